"""The gate and the batch scheduler: system calls in, full batches out."""
