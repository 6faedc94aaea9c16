"""Where the backend computes: a GPU with its streams, or torch's CPU tensors under Triton's interpreter.

Everything that differs between the two is here. On the CPU there is one order of things: a stream is None, a mark is
None, and whatever was started is over. Triton's interpreter is for one thread at a time, so `on` is a lock there.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, TypeAlias

import torch

from libsym.errors import Invalid, NoSpace

log = logging.getLogger(__name__)

Stream: TypeAlias = "torch.cuda.Stream | None"
Mark: TypeAlias = "torch.cuda.Event | None"
"""A point in a stream that others can wait for."""


class Device:
    """One GPU, or the CPU in its place."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch = torch_device
        self.is_gpu = torch_device.type == "cuda"
        self._one_at_a_time = threading.RLock()

    def stream(self) -> Stream:
        """A new queue of work."""
        return torch.cuda.Stream(self.torch) if self.is_gpu else None

    @contextmanager
    def on(self, stream: Stream, *, kernels: bool = True) -> Iterator[None]:
        """What is launched inside goes to this stream. `kernels`: Triton's are among it, not copies alone."""
        if stream is not None:
            with torch.inference_mode(), torch.cuda.stream(stream):
                yield
        else:
            with torch.inference_mode(), self._one_at_a_time if kernels else nullcontext():
                yield

    def mark(self, stream: Stream) -> Mark:
        """All that was launched on this stream up to here."""
        return None if stream is None else stream.record_event()

    def wait(self, stream: Stream, mark: Mark) -> None:
        """What is launched on this stream from here on begins after the mark; the host does not wait."""
        if stream is not None and mark is not None:
            stream.wait_event(mark)

    def finish(self, mark: Mark) -> None:
        """The host waits for the mark."""
        if mark is not None:
            mark.synchronize()

    def settle(self) -> None:
        """The host waits for everything that was launched anywhere."""
        if self.is_gpu:
            torch.cuda.synchronize(self.torch)

    def is_over(self, mark: Mark) -> bool:
        return mark is None or bool(mark.query())

    def pinned(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory that copies to and from the device need not stage."""
        try:
            return torch.empty(shape, dtype=dtype, pin_memory=self.is_gpu)
        except RuntimeError as error:
            raise NoSpace(f"no pinned host memory of {shape} numbers can be had: {error}") from error

    def pin(self, memory: torch.Tensor) -> None:
        """Make memory that is there already pinned, until the end; where it can't be had, copies are staged by CUDA."""
        if self.is_gpu:
            runtime: Any = torch.cuda.cudart()
            num_bytes = memory.numel() * memory.element_size()
            error = int(runtime.cudaHostRegister(memory.data_ptr(), num_bytes, 0))
            if error:
                log.warning("%d bytes cannot be pinned (CUDA error %d): swaps of them are slow", num_bytes, error)
                # CUDA shows the error to whoever looks next: let that be us.
                with suppress(RuntimeError):
                    torch.zeros(1, device=self.torch)

    def upload(self, numbers: torch.Tensor) -> torch.Tensor:
        """A host tensor on the device, in the order of the current stream; the host does not wait."""
        if not self.is_gpu:
            return numbers
        return numbers.pin_memory().to(self.torch, non_blocking=True)

    def free_bytes(self) -> int:
        """Of the device's memory."""
        return torch.cuda.mem_get_info(self.torch)[0] if self.is_gpu else _INTERPRETED_BYTES

    def check_age(self, kv_dtype: str) -> None:
        """Invalid where the kernels need a newer GPU: said at start, not in the first step."""
        if not self.is_gpu:
            return
        capability = torch.cuda.get_device_capability(self.torch)
        is_float8 = kv_dtype == "F8_E4M3"
        needed = _LEAST_FOR_FLOAT8 if is_float8 else _LEAST_CAPABILITY
        if capability < needed:
            least, found = (".".join(map(str, numbers)) for numbers in (needed, capability))
            what = "--kv-dtype fp8" if is_float8 else "the decoder"
            raise Invalid(f"{what} needs a GPU of compute capability {least}, {self.name} has {found}")

    @property
    def architecture(self) -> str:
        """What kernels are compiled for, `sm_90`; `interpreter` without a GPU."""
        if not self.is_gpu:
            return "interpreter"
        major, minor = torch.cuda.get_device_capability(self.torch)
        return f"sm_{major}{minor}"

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.torch) if self.is_gpu else "Triton's interpreter"


_LEAST_CAPABILITY = (8, 0)
"""The kernels are compiled and recorded for it; bfloat16 begins there."""
_LEAST_FOR_FLOAT8 = (8, 9)
_INTERPRETED_BYTES = 1 << 30
"""What the interpreter's device is said to have."""


def open_device() -> Device:
    """The GPU of this process; CPU tensors when TRITON_INTERPRET=1 is set, which is Triton's own switch."""
    if is_interpreted():
        return Device(torch.device("cpu"))
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = f"torch {torch.__version__} was built " + (
            f"for CUDA {built}, and finds no GPU that its driver supports" if built else "without CUDA"
        )
        raise Invalid(f"no NVIDIA GPU can be used ({why}): mend that, or say --device cpu")
    return Device(torch.device("cuda", torch.cuda.current_device()))


@contextmanager
def naming_full_memory() -> Iterator[None]:
    """NoSpace where the GPU runs full: others took some since it was planned, or all that was free was asked for."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise NoSpace("the GPU's memory ran out: say a smaller --gpu-memory, or end what else uses it") from error


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter; it decided when it was imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"
