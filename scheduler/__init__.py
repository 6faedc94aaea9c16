"""The gate takes system calls of programs, and the batch scheduler computes these calls in full batches."""
