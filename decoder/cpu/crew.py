"""Threads for work between the steps of a decoder that has none to lend: the CPU step's, without a model."""

from __future__ import annotations

import os

from decoder.cpu._step import ffi, lib


class Crew:
    """So many threads, the caller's among them; one caller at a time."""

    def __init__(self, num_threads: int) -> None:
        self._crew = lib.sym_crew_new(num_threads)
        if self._crew == ffi.NULL:
            raise OSError(ffi.errno, f"{num_threads} threads cannot be started: {os.strerror(ffi.errno)}")
        self.parallel = int(ffi.cast("uintptr_t", ffi.addressof(lib, "sym_parallel")))
        """A `sym_parallel_function`, to be called with `address`."""

    @property
    def address(self) -> int:
        """A `sym_decoder` without a model, good until it is closed."""
        assert self._crew is not None
        return int(ffi.cast("uintptr_t", self._crew))

    def close(self) -> None:
        """Ends the threads, when nobody uses them."""
        if self._crew is not None:
            lib.sym_decoder_free(self._crew)
            self._crew = None
