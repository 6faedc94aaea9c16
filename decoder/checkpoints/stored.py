"""Tensors where they lie in a checkpoint's file, not yet decoded."""

from __future__ import annotations

import mmap
import stat
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from decoder.checkpoints.quants import ENCODINGS, Encoding, FloatArray, dequantize
from libsym.errors import Invalid, NoAccess, NotFound, SymError


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint: its name there, its shape `[out, in]` and its bytes."""

    name: str
    file: Path
    encoding: Encoding
    shape: tuple[int, ...]
    data: memoryview

    @classmethod
    def of_array(cls, name: str, array: FloatArray) -> StoredTensor:
        """A float32 array in memory as if it lay in a file."""
        data = np.ascontiguousarray(array, dtype=np.float32).data.cast("B")
        return cls(name, Path("memory"), ENCODINGS["F32"], array.shape, data)

    def read_into(self, out: FloatArray) -> None:
        """Decode to float32."""
        assert out.shape == self.shape, (out.shape, self.shape)
        if not dequantize(self.encoding, self.data, out):
            raise Invalid(f"{self.file}: tensor {self.name} holds values that are not finite: the file is damaged")


def map_file(path: Path) -> memoryview:
    """The bytes of a file, mapped: a checkpoint larger than memory can still be looked into.

    The file must not be cut while it is mapped and read: the process would die of SIGBUS. Replace a checkpoint by
    rename, as installers do, and the mapping keeps the old file.
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
    except (OSError, ValueError) as error:  # ValueError: the file was emptied in between
        raise file_error(path, error) from error


def _kind(mode: int) -> str:
    return "directory" if stat.S_ISDIR(mode) else "device, socket or pipe"


def file_error(path: Path, error: Exception) -> SymError:
    """The error of the tree that says why a checkpoint's file cannot be read."""
    kinds: dict[type[Exception], type[SymError]] = {FileNotFoundError: NotFound, PermissionError: NoAccess}
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return kinds.get(type(error), Invalid)(f"{path}: cannot be read: {reason}")
