"""Settings of the whole test process, made before any test module is imported."""

import os

# Triton decides at its import whether kernels run in its interpreter, and transformers imports Triton.
# On a machine with a GPU, TRITON_INTERPRET=0 runs the kernel tests there.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Torch's threads wait for each other by spinning: at the tests' small shapes they only take the processor from others.
os.environ.setdefault("OMP_NUM_THREADS", "1")
