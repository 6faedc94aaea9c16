"""The command `symphony`, whose run waits for calls as streams.c says, or as long as a file says: for waits.py.

    waiting_daemon.py FILE serve ...

The file holds two numbers of 64 bits, which the daemon maps: see fixed_wait.c.
"""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import sys
import tempfile
from pathlib import Path

sys.path.append(sys.path.pop(0))  # beside this file `decoder` is a benchmark

from scheduler.batch import loop_build


def install(path: Path) -> mmap.mmap:
    """Compile the run with fixed waits, and have all modules import that; the file, mapped."""
    with tempfile.TemporaryDirectory() as directory:
        there = {name: Path(loop_build.__file__).with_name(name) for name in loop_build.SOURCES}
        there["streams.c"] = Path(__file__).with_name("fixed_wait.c")
        library = loop_build.builder([str(path) for path in (*there.values(), *loop_build.OTHERS)]).compile(directory)
        spec = importlib.util.spec_from_file_location("scheduler._loop", library)
        sys.modules["scheduler._loop"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["scheduler._loop"])
        found = ctypes.c_void_p.in_dll(ctypes.CDLL(library), "fixed_wait")
    with path.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    found.value = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    return mapped


if __name__ == "__main__":
    mapped = install(Path(sys.argv[1]))
    from symphony.cli import main

    sys.exit(main(sys.argv[2:]))
