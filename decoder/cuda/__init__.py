"""The decoder on an NVIDIA GPU: the Triton kernels, and the step that uses them."""
