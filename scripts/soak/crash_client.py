"""Client of a daemon that will be killed: random operations on its own directory, each logged before it begins.

    crash_client.py SOCKET MOUNT DIRECTORY IMAGES    reads `go SEED` when a daemon starts, and prints `over` at its end

The log `DIRECTORY.log` gets (what, name, value) before an operation, and [result] after it. Only the daemon is killed,
so the log is complete.
"""

from __future__ import annotations

import errno
import json
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from crash_model import KV, PLAIN, Directory
from crash_seen import seen_in

import libsym as sym

MAX_FILES = 12
MAX_TOKENS = 300
OPERATIONS = {
    "create": 6,
    "append": 10,
    "generate": 3,
    "fork": 6,
    "rename": 5,
    "remove": 4,
    "import": 2,
    "write": 4,
    "truncate": 3,
    "sync": 12,
    "sync all": 1,
}


class Client:
    """Random operations on one directory during one life of a daemon."""

    def __init__(self, mount: Path, directory: str, images: dict[str, list[int]], log: TextIO, seed: int) -> None:
        self._where = mount / directory
        self._inside = directory
        self._images = images
        """Image files to import, with the tokens of each."""
        self._log = log
        self._random = random.Random(seed)
        self._number = seed << 20
        self._directory = Directory.found(seen_in(self._where, directory))

    def run(self) -> None:
        """Perform operations until the daemon is gone."""
        while True:
            self.one()

    def one(self) -> None:
        """Perform one random operation, if the existing files allow it."""
        what = self._random.choices(list(OPERATIONS), list(OPERATIONS.values()))[0]
        existing = [*self._directory.existing(KV), *self._directory.existing(PLAIN)]
        if what in {"create", "fork", "import", "write"} and len(existing) >= MAX_FILES:
            what = "remove"
        kind = KV if what in {"fork", "generate"} else None
        names = existing if kind is None else self._directory.existing(kind)
        if what in {"create", "import", "write"}:
            name = self._new_name()
        elif what == "sync all":
            name = ""
        elif names:
            name = self._random.choice(names)
        else:
            return
        value = self._value(what, name, existing)
        self._tell([what, name, value])
        begun = [list(Path(value).read_bytes()), self._images[value]] if what == "import" else value
        self._directory.begin(what, name, begun)
        result = self._do(what, name, value)
        self._tell([result])
        self._directory.end(what, name, result)

    def _tell(self, words: list[Any]) -> None:
        os.write(self._log.fileno(), json.dumps(words).encode() + b"\n")

    def _new_name(self) -> str:
        self._number += 1
        return f"{self._number:x}.kv"

    def _value(self, what: str, name: str, existing: list[str]) -> Any:
        file, draw = self._directory.file(name), self._random
        if what == "append":
            count = draw.choice((1, 1, 5, 40, 90))
            return [draw.randrange(1, 200) for _ in range(count)]
        if what == "write":
            return [draw.randrange(256) for _ in range(draw.choice((0, 10, 5_000)))]
        if what == "generate":
            return []
        if what == "import":
            return draw.choice(list(self._images))
        if what == "fork":
            return self._new_name()
        if what == "rename":
            others = [each for each in existing if each != name]
            return draw.choice(others) if others and draw.random() < 0.5 else self._new_name()
        if what == "truncate":
            assert file is not None
            return draw.randint(0, len(file.now.content))
        return None

    def _do(self, what: str, name: str, value: Any) -> Any:
        file = self._directory.file(name)
        is_kv = file is not None and file.now.kind == KV
        path, inside = self._where / name, f"{self._inside}/{name}"
        if what == "create":
            sym.kv_create(inside).close()
        elif what == "fork":
            sym.kv_fork(inside, f"{self._inside}/{value}").close()
        elif what == "rename":
            path.rename(self._where / value)
        elif what == "remove":
            path.unlink()
        elif what == "import":
            path.write_bytes(Path(value).read_bytes())
        elif what == "write":
            path.write_bytes(bytes(value))
        elif what == "sync all":
            sym.kv_sync()
        elif is_kv:
            return self._do_kv(what, inside, value)
        else:
            self._do_plain(what, path, value)
        return None

    @staticmethod
    def _do_kv(what: str, inside: str, value: Any) -> Any:
        with sym.kv_open(inside, "rw") as kv:
            if what == "append":
                sym.pred(kv, value) if len(value) == 5 else sym.kv_write(kv, value)
            elif what == "generate":
                list(sym.generate(kv, [7], stop_at_end=False, max_tokens=20))
                return sym.kv_read(kv)[0]
            elif what == "truncate":
                sym.kv_truncate(kv, value)
            elif what == "sync":
                sym.kv_sync(kv)
        return None

    @staticmethod
    def _do_plain(what: str, path: Path, value: Any) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND)
        try:
            if what == "append":
                os.write(descriptor, bytes(value))
            elif what == "truncate":
                os.ftruncate(descriptor, value)
            elif what == "sync":
                os.fsync(descriptor)
        finally:
            with suppress_invalid():
                os.close(descriptor)


@contextmanager
def suppress_invalid() -> Iterator[None]:
    """Ignore EINVAL. A crash may leave half of an imported image, and its close reports an invalid image."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


def main() -> None:
    socket, mount, directory, images = sys.argv[1:]
    known = json.loads(Path(images).read_text())
    print("ready", flush=True)
    for line in sys.stdin:
        seed = int(line.split()[1])
        with Path(f"{directory}.log").open("w") as log:
            try:
                sym.connect(socket)
                Client(Path(mount), Path(directory).name, known, log, seed).run()
            except (sym.NotConnected, ConnectionError, OSError) as error:
                if not is_end(error, mount):
                    raise
        sym.close()
        print("over", flush=True)


def is_end(error: BaseException, mount: str) -> bool:
    """Return whether an error means that the daemon has ended. Paths on the mount then lead to the directory below the
    mount.
    """
    is_gone = getattr(error, "errno", None) in {103, 107, 19} or not os.path.ismount(mount)
    return isinstance(error, (sym.NotConnected, ConnectionError)) or is_gone


if __name__ == "__main__":
    main()
