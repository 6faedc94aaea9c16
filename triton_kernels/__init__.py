"""Triton kernels: each file has a kernel and the function that launches it on torch tensors."""
