"""The command `symphony` with a CPU decoder whose steps sleep: the daemons of ceiling.py.

    sleeping_daemon.py MS serve ...

The tree that PYTHONPATH names is served as it is, but for the function of the step: that of sleeping_step.c, which
takes no interpreter's lock. Pages are neither written nor copied; the logits of a row are 0 but for one.
"""

from __future__ import annotations

import ctypes
import dataclasses
import sys
from pathlib import Path

sys.path.append(sys.path.pop(0))  # beside this file `decoder` is a benchmark

from compiled import compiled

import libsym
from decoder.batch import NativeStep
from decoder.cpu.backend import CpuDecoder
from symphony.cli import main


def sleeping(step_ms: float) -> property:
    """Return `native` of a `CpuDecoder` whose steps take so long."""
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
