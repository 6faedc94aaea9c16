"""Triton kernels, one a file: a kernel and the function that launches it on torch tensors."""
