"""Triton kernels: each file has a kernel and the function that launches it on torch tensors.

Three words have another meaning in these files. A program is one instance of a kernel, as in Triton. A slot is the
place of an entry in its page. In attention, a step also is a walk over `STEP_ENTRIES` entries.
"""
