"""Tensors in a checkpoint's mapped file, not yet decoded."""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import stat
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from decoder.checkpoints.quants import ENCODINGS, Encoding, Float32Array, dequantize
from libsym.errors import Invalid, NoAccess, NotFound, SymError

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MEMORY = Path("memory")
"""`StoredTensor.file` of an array in memory."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint: its name in the file, its shape `[out, in]` and its bytes."""

    name: str
    file: Path
    encoding: Encoding
    shape: tuple[int, ...]
    data: memoryview

    @classmethod
    def of_array(cls, name: str, array: Float32Array) -> StoredTensor:
        """Return a stored tensor over a float32 array in memory."""
        data = np.ascontiguousarray(array, dtype=np.float32).data.cast("B")
        return cls(name, _MEMORY, ENCODINGS["F32"], array.shape, data)

    @property
    def is_of_file(self) -> bool:
        return self.file != _MEMORY

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """Return the tensors of the file that this tensor is made of: itself."""
        return (self,)

    def rows(self, first: int, end: int) -> StoredTensor:
        """Return rows [first, end) of a matrix, encoded as in the file."""
        table = np.frombuffer(self.data, dtype=np.uint8).reshape(self.shape[0], -1)
        return dataclasses.replace(self, shape=(end - first, *self.shape[1:]), data=table[first:end].reshape(-1).data)

    def read_ahead(self, first: int, end: int) -> None:
        """Have the kernel read rows [first, end) of a matrix into the page cache, while this thread goes on."""
        data = np.frombuffer(self.data, np.uint8).reshape(self.shape[0], -1)[first:end]
        skipped = data.ctypes.data % mmap.PAGESIZE
        # The rows may be memory of no file, for which the kernel has nothing to do.
        _libc.madvise(data.ctypes.data - skipped, data.nbytes + skipped, mmap.MADV_WILLNEED)

    def read_into(self, out: Float32Array) -> None:
        """Decode the tensor to float32. Invalid: a value is not finite."""
        assert out.shape == self.shape, (out.shape, self.shape)
        if not dequantize(self.encoding, self.data, out):
            raise Invalid(f"{self.file}: tensor {self.name} holds values that are not finite: the file is damaged")


def map_file(path: Path) -> memoryview:
    """Map the bytes of a file. A checkpoint may be larger than memory.

    Do not truncate a mapped file: the process would die of SIGBUS. To replace a checkpoint, rename a new file over it,
    as installers do. The mapping keeps the old file.
    """
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):  # opening a FIFO would wait for its other end
            raise Invalid(f"{path}: is a {_kind(mode)}, not a file")
        if path.stat().st_size == 0:
            raise Invalid(f"{path}: the file is empty: copy or download it again")
        with path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except SymError:
        raise
    except (OSError, ValueError) as error:  # ValueError: the file became empty after the check
        raise file_error(path, error) from error


def _kind(mode: int) -> str:
    return "directory" if stat.S_ISDIR(mode) else "device, socket or pipe"


def file_error(path: Path, error: Exception) -> SymError:
    """Return the `SymError` that says why a checkpoint's file cannot be read."""
    kinds: dict[type[Exception], type[SymError]] = {FileNotFoundError: NotFound, PermissionError: NoAccess}
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return kinds.get(type(error), Invalid)(f"{path}: cannot be read: {reason}")
