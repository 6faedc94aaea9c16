"""Threads of the CPU step without a model. They do the work between steps if a decoder has no CPU threads."""

from __future__ import annotations

import os

from decoder.cpu._step import ffi, lib


class Crew:
    """Threads for work between steps, including the caller's thread. One caller at a time may use them."""

    def __init__(self, num_threads: int) -> None:
        self._crew = lib.sym_crew_new(num_threads)
        if self._crew == ffi.NULL:
            raise OSError(ffi.errno, f"{num_threads} threads cannot be started: {os.strerror(ffi.errno)}")
        self.parallel = int(ffi.cast("uintptr_t", ffi.addressof(lib, "sym_parallel")))
        """Address of a `sym_parallel_function`. Its first argument must be `address`."""

    @property
    def address(self) -> int:
        """Return a `sym_decoder` without a model, valid until `close`."""
        assert self._crew is not None
        return int(ffi.cast("uintptr_t", self._crew))

    def close(self) -> None:
        """End the threads. No caller may be using them."""
        if self._crew is not None:
            lib.sym_decoder_free(self._crew)
            self._crew = None
