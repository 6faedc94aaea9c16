"""The gate takes system calls of programs, and the batch scheduler computes them in full batches."""
