"""Client programs of a fleet's machines: threads with a connection each, because sockets and mounts of all machines are
here.
"""

from __future__ import annotations

import errno
import json
import math
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

import numpy as np
from fleet_model import FileModel, Name

import libsym as sym
from kvfs.images.format import TENSORS

LOOK_S = 0.9
"""An open that took longer may have given up to ask etcd for newer versions."""
AFTERMATH_S = 25.0
"""Time after a kill or a partition in which a lease, a connection or a registration may still be missing."""
OUTSIDE_S = 5.0
"""Longest time of a few calls outside of the fleet's directory, while the daemon runs."""
NUM_SLOTS, MAX_TOKENS = 4, 1200
SEED = [1, 2, 3, 4, 5, 6, 7]
"""Tokens of the file of which namers make forks."""
PARENTS = ("fleet/p", "fleet/q")
EXPECTED = {"done", "ETIMEDOUT", "EIO", "ESTALE", "EINVAL"}
"""Errors of a machine that is cut off. EINVAL: the file's maker died before the first sync."""
GONE = {errno.ENOTCONN, errno.ECONNABORTED, errno.ENODEV, errno.ECONNRESET, errno.EPIPE}


def tokens_of_image(image: bytes) -> list[int]:
    """Return the tokens of an image that the mount gave. ValueError: the image does not have its digest."""
    if not image:  # of a file without a version
        return []
    start = 8 + int.from_bytes(image[:8], "little")
    header = json.loads(image[8:start])
    parts = {name: image[slice(*(start + at for at in header[name]["data_offsets"]))] for name in TENSORS}
    pages, num_pages, digest = parts["pages"], header["pages"]["shape"][0], blake2b(digest_size=32)
    page_bytes = len(pages) // max(1, num_pages)
    for number in range(num_pages):
        page = pages[number * page_bytes : (number + 1) * page_bytes]
        digest.update(blake2b(page, digest_size=32).digest())
    digest.update(parts["tokens"] + parts["positions"])
    if digest.hexdigest() != header["__metadata__"]["digest"]:
        raise ValueError(f"{digest.hexdigest()} is not the digest in {header['__metadata__']}")
    tokens: list[int] = np.frombuffer(parts["tokens"], "<i4").tolist()
    return tokens


class Where(Protocol):
    """The machine of a client."""

    name: str
    mount: Path
    socket: Path
    log: Path


@dataclass(slots=True)
class Disturbance:
    machine: str
    what: str
    end_s: float = math.inf


@dataclass
class World:
    """State that all clients share."""

    model: FileModel = field(default_factory=FileModel)
    over: threading.Event = field(default_factory=threading.Event)
    slots: list[int] = field(default_factory=lambda: [0] * NUM_SLOTS)
    files: list[str] = field(default_factory=list)
    names: list[Name] = field(default_factory=list)
    free: list[Name] = field(default_factory=list)
    """Names that no client has, and whose changes are not in doubt."""
    answers: Counter[str] = field(default_factory=Counter)
    disturbances: list[Disturbance] = field(default_factory=list)
    etcd_gone_s: float = 0.0
    """Begin of the long time without etcd. 0: etcd is there."""
    timed_out: Counter[str] = field(default_factory=Counter)
    """Calls that failed with ETIMEDOUT in the long time without etcd, by kind."""
    acknowledged_s: dict[str, float] = field(default_factory=dict)
    longest_s: dict[str, float] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def disturbed(self, machine: str, what: str) -> Disturbance:
        """Note the begin of a disturbance."""
        self.disturbances.append(disturbance := Disturbance(machine, what))
        return disturbance

    def hit(self, since_s: float, *kinds: str) -> set[str]:
        """Return the machines that were disturbed since then. `kinds`: by these kinds only."""
        recent = [each for each in self.disturbances if each.end_s > since_s]
        return {each.machine for each in recent if not kinds or each.what in kinds}

    def is_wrong(self, machine: str, what: str) -> None:
        self.model.wrong.append(f"{time.monotonic():.3f} {machine}: {what}")


class Client(threading.Thread):
    """A program that does the same again and again, and connects again when its daemon was killed."""

    pause_s = 0.1

    def __init__(self, world: World, where: Where, seed: int) -> None:
        super().__init__(daemon=True, name=f"{type(self).__name__} of {where.name}")
        self.world, self.where, self.draw = world, where, random.Random(seed)

    def run(self) -> None:
        while not self.world.over.is_set():
            try:
                with sym.connection(self.where.socket):
                    while not self.world.over.is_set():
                        self.once()
                        time.sleep(self.draw.uniform(0.2, 2) * self.pause_s)
            except (sym.NotConnected, ConnectionError):
                time.sleep(0.1)
            except Exception as error:
                self.world.is_wrong(self.where.name, f"{self.name} has failed: {error!r}")
                raise

    def once(self) -> None:
        raise NotImplementedError

    def freshness(self) -> int:
        """Return a number that stays the same while changes of other machines arrive here. 0: they do not arrive."""
        trouble = sym.daemon_stat()["fleet"]["names_trouble"]
        return 0 if trouble else 1 + self.where.log.read_bytes().count(b"changes of names do not arrive")

    def answered(self, what: str, error: OSError | None, began_s: float) -> None:
        """Count an answer, and check an error that a calm fleet must not give."""
        took_s, world, name = time.monotonic() - began_s, self.world, self.where.name
        kind = "done" if error is None else errno.errorcode.get(getattr(error, "errno", 0) or 0, type(error).__name__)
        with world.lock:
            world.answers[f"{what} {kind}"] += 1
            world.longest_s[what] = max(took_s, world.longest_s.get(what, 0))
        code = 0 if error is None else error.errno
        if isinstance(error, sym.NotConnected) or code in GONE or kind in {"EBUSY", "ENOENT", "EEXIST"}:
            return
        if kind not in EXPECTED:
            world.is_wrong(name, f"{what} failed with {kind}: {error}")
        if world.etcd_gone_s and began_s > world.etcd_gone_s:
            self._answered_without_etcd(what, kind, took_s)
        elif error is not None:
            away = world.hit(began_s - AFTERMATH_S)
            if len(away - {name}) <= 1 and not away & {name, "etcd"}:
                world.is_wrong(name, f"{what} failed with {error} after {took_s:.1f} s, and {away} was away")

    def _answered_without_etcd(self, what: str, kind: str, took_s: float) -> None:
        wanted = "done" if what == "read" else "ETIMEDOUT"
        if kind == "done" != wanted and what == "open":  # the right to write was here
            return
        if kind != wanted:
            self.world.is_wrong(self.where.name, f"{what} without etcd: {kind} after {took_s:.1f} s, not {wanted}")
        self.world.timed_out[what] += kind == "ETIMEDOUT"


class Appender(Client):
    """Appends records to files of all machines."""

    pause_s = 0.15

    def once(self) -> None:
        slot = self.draw.randrange(NUM_SLOTS)
        number = self.world.slots[slot]
        path = f"fleet/{slot}-{number}.kv"
        kv = self._opened(path)
        if kv is None:
            return
        try:
            self._append(kv, path)
            if kv.len() > MAX_TOKENS:
                self.world.slots[slot] = max(self.world.slots[slot], number + 1)
        finally:
            with suppress(sym.NotConnected):
                kv.close()

    def _opened(self, path: str) -> sym.KV | None:
        began_s = time.monotonic()
        try:
            try:
                kv = sym.kv_open(path, "rw")
            except sym.NotFound:
                kv = sym.kv_create(path)
                with self.world.lock:
                    self.world.files += [path] if path not in self.world.files else []
        except sym.SymError as error:
            self.answered("open", error, began_s)
            if isinstance(error, sym.Invalid):  # its maker died before the first sync
                slot, _, number = path.removeprefix("fleet/").removesuffix(".kv").partition("-")
                self.world.slots[int(slot)] = max(self.world.slots[int(slot)], int(number) + 1)
            elif isinstance(error, sym.NotConnected):
                raise
            return None
        self.answered("open", None, began_s)
        return kv

    def _append(self, kv: sym.KV, path: str) -> None:
        tokens = sym.kv_read(kv)[0] if kv.len() else []
        record = self.world.model.new(self.where.name, path)
        sym.kv_write(kv, record.tokens)
        if self.draw.random() < 0.1:
            time.sleep(self.draw.uniform(0, 1.5))
        if self.draw.random() < 0.1:
            return  # the daemon syncs it after the close
        began_s, error = time.monotonic(), None
        try:
            sym.kv_sync(kv)
        except sym.SymError as found:
            error = found
        if error is None:
            self.world.model.acknowledged(self.where.name, path, [*tokens, *record.tokens], began_s)
            self.world.acknowledged_s[self.where.name] = time.monotonic()
        self.answered("sync", error, began_s)
        if isinstance(error, sym.NotConnected):
            raise error


class Reader(Client):
    """Reads files of all machines."""

    pause_s = 0.06

    def once(self) -> None:
        files = self.world.files[-NUM_SLOTS:] if self.draw.random() < 0.8 else self.world.files
        if files:
            self.read(self.draw.choice(files))

    def read(self, path: str) -> bool:
        """Read a file. Return whether the content is up to date."""
        fresh, began_s, tokens, why = self.freshness(), time.monotonic(), list[int](), ""
        error: OSError | None = None
        try:
            if self.draw.random() < 0.25:
                with (self.where.mount / path).open("rb") as file:
                    took_s = time.monotonic() - began_s
                    tokens = tokens_of_image(file.read())
            else:
                with sym.kv_open(path) as kv:
                    took_s = time.monotonic() - began_s
                    tokens = sym.kv_read(kv)[0] if kv.len() else []
        except (FileNotFoundError, sym.NotFound, sym.Invalid) as found:  # there is no version yet
            took_s, why = time.monotonic() - began_s, str(found)
        except ValueError as found:
            self.world.is_wrong(self.where.name, f"the image of {path} is damaged: {found}")
            return False
        except OSError as found:  # of libsym or of the mount
            error = sym.NotConnected(str(found)) if found.errno in GONE else found
        self.answered("read", error, began_s)
        if error is not None:
            if isinstance(error, sym.NotConnected):
                raise error
            return False
        strict = fresh > 0 and fresh == self.freshness() and took_s < LOOK_S
        self.world.model.read(self.where.name, path, tokens, began_s, strict=strict, why=why)
        return strict


class Namer(Client):
    """Makes, renames and removes names. No two clients change the same name at once."""

    pause_s = 0.4

    def once(self) -> None:
        world = self.world
        with world.lock:
            is_new = len(world.free) < 8 or self.draw.random() < 0.3
            if is_new:
                number = len(world.names)
                name = Name(number, self.draw.choice(["dir", "file"]), [self._path(number)], may_be_missing=True)
                world.names.append(name)
            else:
                name = world.free.pop(self.draw.randrange(len(world.free)))
        if is_new:
            self._change(name, "make", name.paths, lambda: self._make(name))
        elif self.draw.random() < 0.5:
            old, new = name.paths[0], self._path(name.number)
            self._change(name, "rename", [new], lambda: sym.kv_rename(old, new))
        else:
            self._change(name, "remove", [], lambda: self._remove(name))

    def _path(self, number: int) -> str:
        return f"{self.draw.choice(PARENTS)}/{number}.{self.draw.randrange(10**6)}"

    def _make(self, name: Name) -> None:
        if name.kind == "dir":
            sym.kv_mkdir(name.paths[0])
            return
        if self.draw.random() < 0.5:
            image = (self.where.mount / "seed.kv").read_bytes()
            with (self.where.mount / name.paths[0]).open("xb") as file:
                file.write(image)
            with (self.where.mount / name.paths[0]).open("rb") as file:
                os.fsync(file.fileno())
            return
        with sym.kv_fork("seed.kv", name.paths[0]) as kv, suppress(sym.SymError):
            sym.kv_sync(kv)

    def _remove(self, name: Name) -> None:
        if name.kind == "dir":
            (self.where.mount / name.paths[0]).rmdir()
        else:
            sym.kv_remove(name.paths[0])

    def _change(self, name: Name, what: str, after: list[str], change: Callable[[], None]) -> None:
        fresh, began_s, before = self.freshness(), time.monotonic(), [*name.paths]
        error: OSError | None = None
        try:
            change()
        except OSError as found:  # of libsym or of the mount
            error = found
        took_s = time.monotonic() - began_s
        if error is None:
            name.paths, name.may_be_missing = after, not after
            with self.world.lock:
                self.world.free += [name] if after else []
        else:
            name.paths = [*before, *(each for each in after if each not in before)]
            name.may_be_missing |= what != "rename"
        self.answered("name", error, began_s)
        if isinstance(error, sym.NotConnected) or getattr(error, "errno", 0) in GONE:
            raise sym.NotConnected(str(error))
        strange = {errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY}
        is_strange = error is not None and error.errno in strange and took_s < LOOK_S
        if is_strange and 0 < fresh == self.freshness():
            self.world.is_wrong(self.where.name, f"{what} of {before}: {error}")


class Outsider(Client):
    """Uses a file of its own machine, and must not notice what happens to the fleet."""

    pause_s = 0.1

    def once(self) -> None:
        began_s, world, name = time.monotonic(), self.world, self.where.name
        error: OSError | None = None
        try:
            with sym.kv_open("outside.kv", "a") as kv:
                sym.kv_write(kv, [1, 2, 3])
                if kv.len() > 100:
                    sym.kv_truncate(kv, 0)
                sym.kv_sync(kv)
            (self.where.mount / "outside.kv").stat()
            next(self.where.mount.iterdir(), None)
        except OSError as found:
            error = found
        took_s = time.monotonic() - began_s
        if name not in world.hit(began_s - 0.5, "kill", "pause"):
            world.longest_s["outside"] = max(took_s, world.longest_s.get("outside", 0))
            if error is not None or took_s > OUTSIDE_S:
                world.is_wrong(name, f"calls outside the fleet: {error} after {took_s:.1f} s")
        if error is not None:
            raise sym.NotConnected(str(error))
