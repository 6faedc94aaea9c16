"""The device of the backend: a GPU with its streams, or torch's CPU tensors under Triton's interpreter.

Only this module distinguishes the two. On the CPU, work is synchronous: streams and marks are None, and a launch is
over when it returns. Triton's interpreter allows one thread at a time, so `on` takes a lock there.
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
"""A point in a stream that other streams and the host can wait for."""


class Device:
    """A GPU, or the CPU as its substitute."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch = torch_device
        self.is_gpu = torch_device.type == "cuda"
        self._one_at_a_time = threading.RLock()

    def stream(self) -> Stream:
        """Return a new queue of work."""
        return torch.cuda.Stream(self.torch) if self.is_gpu else None

    @contextmanager
    def on(self, stream: Stream, *, kernels: bool = True) -> Iterator[None]:
        """Send launches inside the block to this stream. `kernels`: some launches are Triton kernels, not copies."""
        if stream is not None:
            with torch.inference_mode(), torch.cuda.stream(stream):
                yield
        else:
            with torch.inference_mode(), self._one_at_a_time if kernels else nullcontext():
                yield

    def mark(self, stream: Stream) -> Mark:
        """Return a mark after all earlier launches on this stream."""
        return None if stream is None else stream.record_event()

    def wait(self, stream: Stream, mark: Mark) -> None:
        """Make later launches on this stream begin after the mark. The host does not wait."""
        if stream is not None and mark is not None:
            stream.wait_event(mark)

    def finish(self, mark: Mark) -> None:
        """Make the host wait until the device has passed the mark."""
        if mark is not None:
            mark.synchronize()

    def settle(self) -> None:
        """Make the host wait for all launches on all streams."""
        if self.is_gpu:
            torch.cuda.synchronize(self.torch)

    def is_over(self, mark: Mark) -> bool:
        return mark is None or bool(mark.query())

    def pinned(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Return pinned host memory. Copies between it and the device need no staging."""
        try:
            return torch.empty(shape, dtype=dtype, pin_memory=self.is_gpu)
        except RuntimeError as error:
            raise NoSpace(f"no pinned host memory of {shape} numbers can be had: {error}") from error

    def pin(self, memory: torch.Tensor) -> None:
        """Pin existing memory until the process ends. If that fails, CUDA stages the copies."""
        if self.is_gpu:
            runtime: Any = torch.cuda.cudart()
            num_bytes = memory.numel() * memory.element_size()
            error = int(runtime.cudaHostRegister(memory.data_ptr(), num_bytes, 0))
            if error:
                log.warning("%d bytes cannot be pinned (CUDA error %d): swaps of them are slow", num_bytes, error)
                # CUDA reports the error to the next caller of CUDA, so call CUDA here.
                with suppress(RuntimeError):
                    torch.zeros(1, device=self.torch)

    def upload(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return a device copy of a host tensor, in the order of the current stream. The host does not wait."""
        if not self.is_gpu:
            return numbers
        return numbers.pin_memory().to(self.torch, non_blocking=True)

    def free_bytes(self) -> int:
        """Return the free bytes of the device's memory."""
        return torch.cuda.mem_get_info(self.torch)[0] if self.is_gpu else _INTERPRETED_BYTES

    def check_age(self, kv_dtype: str) -> None:
        """Raise Invalid if the kernels need a newer GPU. The daemon calls this at start, before the first step."""
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
        """Return the architecture that kernels are compiled for, such as `sm_90`, or `interpreter` without a GPU."""
        if not self.is_gpu:
            return "interpreter"
        major, minor = torch.cuda.get_device_capability(self.torch)
        return f"sm_{major}{minor}"

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.torch) if self.is_gpu else "Triton's interpreter"


_LEAST_CAPABILITY = (8, 0)
"""Least compute capability that the kernels are compiled and recorded for. Older GPUs lack bfloat16."""
_LEAST_FOR_FLOAT8 = (8, 9)
_INTERPRETED_BYTES = 1 << 30
"""Free memory that the interpreter's device reports."""


def open_device() -> Device:
    """Return the GPU of this process, or the CPU if Triton's environment variable TRITON_INTERPRET is 1."""
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
    """Raise NoSpace if the block runs out of GPU memory.

    In this case, other processes took memory after the plan was made, or the plan took all free memory.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise NoSpace("the GPU's memory ran out: say a smaller --gpu-memory, or end other GPU programs") from error


def is_interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter. Triton decides this when it is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"
