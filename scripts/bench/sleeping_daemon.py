"""The command `symphony` with a CPU decoder whose steps sleep: the daemons of ceiling.py.

    sleeping_daemon.py MS serve ...

The daemon runs from the tree in PYTHONPATH, and only its step function is replaced. The new function in
sleeping_step.c runs without the interpreter's lock. No pages are written or copied. In a row of logits, one logit is 1
and all others are 0.
"""

from __future__ import annotations

import ctypes
import dataclasses
import sys
from pathlib import Path

from harness import compiled

import libsym
from decoder.batch import NativeStep
from decoder.cpu.backend import CpuDecoder
from symphony.cli import main


def sleeping(step_ms: float) -> property:
    """Return a property `native` for `CpuDecoder` that makes each step only sleep for this time."""
    step = compiled(Path(__file__).with_name("sleeping_step.c"), f"-I{Path(libsym.__file__).parent}")
    of_a_decoder = CpuDecoder.native.fget
    address = ctypes.cast(step.sleeping_step, ctypes.c_void_p).value

    def native(decoder: CpuDecoder) -> NativeStep:
        for name, value in (("step_ns", int(step_ms * 1e6)), ("vocab_size", decoder.config.vocab_size)):
            ctypes.c_int64.in_dll(step, name).value = value
        return dataclasses.replace(of_a_decoder(decoder), function=address)

    return property(native)


if __name__ == "__main__":
    CpuDecoder.native = sleeping(float(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
