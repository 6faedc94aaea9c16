"""Cache of packed weights: a directory of files, each with the panels of one checkpoint in one precision.

    offset        bytes        content
    0             2 MiB        header: xxh3_64 of the rest of the header, then JSON, padded with spaces
    2 MiB         2 MiB each   blocks of panels; the last block is padded with zeros

The JSON has `about`, which names the revision of the layout, the kind of processor, the precision, the model's
fingerprint, the matrices, and the checkpoint's files with device, inode, size and time of change; `digests`, the
xxh3_128 of each of these files; and `sums`, the xxh3_64 of each block. A start compares `about` and reads a sample of
the blocks; fsck reads all blocks.

A file is written under the name NAME.part, whose lock the writer holds, synced, and renamed to NAME. So a file with its
name is complete. A daemon that uses a file holds a shared lock on it.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import hashlib
import json
import logging
import os
import random
import re
import stat
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from decoder.checkpoints.quants import ByteArray
from decoder.cpu._step import lib
from decoder.cpu.panel_memory import HUGE_BYTES, FileView, PanelMemory, gather_huge_pages

REVISION: int = lib.SYM_PANELS_REVISION
BLOCK_BYTES = HUGE_BYTES
"""Bytes of a block, and of the header. A write of a whole huge page makes the page cache use a huge page."""
SUFFIX = ".panels"
FREE_SHARE = 1 / 20
"""Share of the file system that no file of this cache may fill."""
_PART = ".part"
_CHECK_BYTES = 8
_SAMPLED_BLOCKS = 32
_SYNCED_BLOCKS = 128
"""Blocks between two syncs, so that unwritten bytes never fill the memory that the kernel allows for them."""
_GATHERED_BLOCKS = 64
"""Blocks that are written into one gathering of huge pages, which has twice as many: the kernel takes some of them."""
_OWN_FILE, OWN_DIRECTORY = 0o600, 0o700

log = logging.getLogger(__name__)


class Unfit(Exception):  # noqa: N818 - as the errors of libsym
    """Error: a file of the cache cannot be used. The message says why."""


@dataclass(frozen=True, slots=True)
class About:
    """Description of a file of panels: what it is made of, and for which processor."""

    revision: int
    """Revision of the layout of panels, and of the arithmetic that makes them."""
    processor: str
    """Name of the instruction set."""
    precision: str
    model: str
    fingerprint: str
    checkpoint: Sequence[Sequence[Any]]
    """Path, device, inode, size and time of change (in ns) of each file."""
    matrices: Sequence[Sequence[int]]
    """Format, n, k and layout of codes of each matrix, in the order of the file."""

    @property
    def file_name(self) -> str:
        """Return a name for the file. A new checkpoint at the same path has the same name, and replaces the old one."""
        paths = [file[0] for file in self.checkpoint]
        digest = hashlib.blake2b(json.dumps([paths, self.processor, self.precision]).encode(), digest_size=8)
        name = re.sub(r"[^A-Za-z0-9.]+", "-", self.model)[:64].strip(".-")
        return f"{name}-{self.precision}-{digest.hexdigest()}{SUFFIX}"


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a file of panels."""

    about: About
    digests: Sequence[str]
    sums: Sequence[str]

    def encode(self) -> bytes:
        """Return the header as bytes. Unfit: it is too long."""
        text = json.dumps(dataclasses.asdict(self)).encode().ljust(BLOCK_BYTES - _CHECK_BYTES)
        if len(text) > BLOCK_BYTES - _CHECK_BYTES:
            raise Unfit(f"its header would be longer than {BLOCK_BYTES} bytes")
        return xxhash.xxh3_64_digest(text) + text


def read_header(fd: int) -> Header:
    """Return the header of an open file. Unfit: the file is damaged, or has another size than the header says."""
    data = os.pread(fd, BLOCK_BYTES, 0)
    text = data[_CHECK_BYTES:]
    if len(data) != BLOCK_BYTES or xxhash.xxh3_64_digest(text) != data[:_CHECK_BYTES]:
        raise Unfit("its header is damaged")
    try:
        fields = json.loads(text)
        header = Header(About(**fields.pop("about")), **fields)
        num_blocks = len(header.sums)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise Unfit("another release of Symphony wrote it") from None
    if os.fstat(fd).st_size != (1 + num_blocks) * BLOCK_BYTES:
        raise Unfit("it is cut")
    return header


def is_ours(name: str) -> bool:
    """Return whether a file of this name belongs to a cache."""
    return name.endswith((SUFFIX, f"{SUFFIX}{_PART}"))


def is_part(name: str) -> bool:
    """Return whether a file of this name is not whole yet."""
    return name.endswith(_PART)


def is_in_use(fd: int) -> bool:
    """Return whether a daemon uses the open file, or writes it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def damaged_blocks(panels: ByteArray, sums: Sequence[str], blocks: Sequence[int]) -> list[int]:
    """Return the blocks, of those that are to be read, whose bytes do not have their checksum."""
    return [block for block in blocks if _sum(panels, block) != sums[block]]


def _sum(panels: ByteArray, block: int) -> str:
    return xxhash.xxh3_64_hexdigest(_bytes_of(panels, block))


def _bytes_of(panels: ByteArray, block: int) -> memoryview:
    return panels[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES].data


def checkpoint_files(paths: Sequence[Path]) -> list[list[Any]]:
    """Return `About.checkpoint` for these files. OSError: a file is gone."""
    return [[str(path), at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns] for path in paths if (at := path.stat())]


class PanelCache:
    """An open directory of panels, which belongs to this user alone."""

    def __init__(self, directory: Path) -> None:
        """Open the directory; make it if it is missing. Unfit or OSError: the directory cannot be used."""
        self.directory = directory
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=OWN_DIRECTORY, exist_ok=True)
        self._fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)
        _require_own(self._fd, stat.S_IFDIR, OWN_DIRECTORY)

    def load(self, about: About, memory: PanelMemory, checkpoint: Callable[[float], None]) -> bool:
        """Fill the memory from the cache. Return False if no file fits `about`.

        The memory shows the file itself if the page cache has it in huge pages, else it gets a copy.
        """
        try:
            view = self._view(about, memory.num_bytes, checkpoint)
            is_huge = view.is_huge()
            if is_huge:
                memory.show(view)
            else:
                memory.copy(view, checkpoint)
        except FileNotFoundError:
            return False
        except (OSError, Unfit) as error:
            log.warning("%s is not used: %s", self.directory / about.file_name, error)
            return False
        how = "mapped" if is_huge else "copied, because the page cache has the file in small pages"
        log.info("packed weights of %s: %s", self.directory / about.file_name, how)
        return True

    def keep(self, about: About, memory: PanelMemory) -> None:
        """Write the packed weights into the cache, and let the memory show the file in place of its own bytes.

        If another daemon writes the same file, wait for that file. Without room on the disk, nothing is kept. A line of
        the log says so. Steps may read the memory meanwhile.
        """
        path = self.directory / about.file_name
        try:
            with self._locked_part(about.file_name) as part:
                try:
                    view = self._view(about, memory.num_bytes, _no_checkpoint)
                except (OSError, Unfit):  # `load` has logged why
                    view = None
                    self._write(part, about, memory.array)
            view = view or self._view(about, memory.num_bytes, _no_checkpoint)
            if view.is_huge():
                memory.show(view)
            log.info("packed weights are kept in %s", path)
        except (OSError, Unfit) as error:
            log.warning("packed weights are not kept in %s, so the next start packs again: %s", path, error)

    def make_room(self, num_bytes: int = 0) -> bool:
        """Remove files until `num_bytes` more leave FREE_SHARE of the disk free. Return whether they do.

        Files that no daemon uses are removed, the longest unused first. A file in use would keep its space on the disk.
        """
        unused = self._oldest_first()
        while not self._has_room(num_bytes):
            if not unused:
                return False
            self._remove_unused(unused.pop(0))
        return True

    def _has_room(self, num_bytes: int) -> bool:
        disk = os.fstatvfs(self._fd)
        return num_bytes <= (disk.f_bavail - FREE_SHARE * disk.f_blocks) * disk.f_frsize

    def _oldest_first(self) -> list[str]:
        with os.scandir(self._fd) as entries:
            ours = [each for each in entries if is_ours(each.name)]
            return [each.name for each in sorted(ours, key=lambda each: each.stat(follow_symlinks=False).st_mtime_ns)]

    def _remove_unused(self, name: str) -> None:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=self._fd)
        try:
            if not is_in_use(fd):
                os.unlink(name, dir_fd=self._fd)
                log.info("%s is removed: the disk is nearly full", self.directory / name)
        finally:
            os.close(fd)

    def _view(self, about: About, num_bytes: int, checkpoint: Callable[[float], None]) -> FileView:
        """Return the panels of the file that fits `about`, after a check of a sample. OSError, Unfit: there is none."""
        fd = self._open(about.file_name)
        try:
            header = read_header(fd)
            _require_same(header.about, about)
            if len(header.sums) * BLOCK_BYTES != num_bytes:
                raise Unfit(f"it has {len(header.sums)} blocks of panels, not {num_bytes // BLOCK_BYTES}")
            os.utime(fd)  # `make_room` goes by the time of the last use
            view = FileView(fd, BLOCK_BYTES, num_bytes)
            view.read(checkpoint)
        finally:
            os.close(fd)
        blocks = range(len(header.sums))
        sample = random.sample(blocks, min(len(blocks), _SAMPLED_BLOCKS))
        if damaged := damaged_blocks(view.array, header.sums, sample):
            raise Unfit(f"block {damaged[0]} is damaged")
        return view

    def _open(self, name: str) -> int:
        """Open a file, with a shared lock. OSError, Unfit: the file cannot be used."""
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=self._fd)
        try:
            _require_own(fd, stat.S_IFREG, _OWN_FILE)
            fcntl.flock(fd, fcntl.LOCK_SH)
        except BaseException:
            os.close(fd)
            raise
        return fd

    @contextmanager
    def _locked_part(self, name: str) -> Iterator[int]:
        """Make the file NAME.part, or take it over from a writer that died, and hold its lock."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        while True:
            fd = os.open(f"{name}{_PART}", flags, _OWN_FILE, dir_fd=self._fd)
            try:
                _require_own(fd, stat.S_IFREG, _OWN_FILE)
                fcntl.flock(fd, fcntl.LOCK_EX)
                if not self._is_part(name, fd):  # the writer before has renamed or removed the file
                    continue
                try:
                    yield fd
                finally:
                    if self._is_part(name, fd):
                        os.unlink(f"{name}{_PART}", dir_fd=self._fd)
                return
            finally:
                os.close(fd)

    def _is_part(self, name: str, fd: int) -> bool:
        try:
            about = os.stat(f"{name}{_PART}", dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(about, os.fstat(fd))

    def _write(self, part: int, about: About, panels: ByteArray) -> None:
        """Write a whole file, and give it its name. OSError, Unfit: there is no such file."""
        if not self.make_room(needed := BLOCK_BYTES + len(panels)):
            raise OSError(errno.ENOSPC, f"{needed / 1e9:.1f} GB would leave less than 5 % of the disk free")
        digests = [_digest(Path(path)) for path, *_ in about.checkpoint]
        os.ftruncate(part, 0)
        sums = []
        for block in range(len(panels) // BLOCK_BYTES):
            if block % _GATHERED_BLOCKS == 0:
                gather_huge_pages(2 * _GATHERED_BLOCKS * BLOCK_BYTES)
            _write_all(part, _bytes_of(panels, block), block + 1)
            sums.append(_sum(panels, block))
            if len(sums) % _SYNCED_BLOCKS == 0:
                os.fdatasync(part)
        if checkpoint_files([Path(path) for path, *_ in about.checkpoint]) != about.checkpoint:
            raise Unfit("the checkpoint has changed meanwhile")
        _write_all(part, memoryview(Header(about, digests, sums).encode()), 0)
        os.fsync(part)
        os.rename(f"{about.file_name}{_PART}", about.file_name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        os.fsync(self._fd)


def open_cache(directory: Path) -> PanelCache | None:
    """Open a cache. None: the directory cannot be used; the log says why."""
    try:
        return PanelCache(directory)
    except (OSError, Unfit) as error:
        log.warning("%s is no cache for packed weights, so each start packs them: %s", directory, error)
        return None


def _no_checkpoint(_share: float) -> None:
    """Let the work go on."""


def _require_own(fd: int, kind: int, mode: int) -> None:
    about = os.fstat(fd)
    if stat.S_IFMT(about.st_mode) != kind:
        raise Unfit(f"it is no {'directory' if kind == stat.S_IFDIR else 'file'}")
    if about.st_uid != os.geteuid():
        raise Unfit(f"it belongs to uid {about.st_uid}, not to {os.geteuid()}")
    if stat.S_IMODE(about.st_mode) != mode:
        raise Unfit(f"its mode is {stat.S_IMODE(about.st_mode):04o}, not {mode:04o}")


def _require_same(found: About, wanted: About) -> None:
    differ = [key for key, value in dataclasses.asdict(wanted).items() if getattr(found, key) != value]
    if differ:
        raise Unfit(f"it was made for another {', '.join(differ)}")


def _write_all(fd: int, data: memoryview, block: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], block * BLOCK_BYTES + done)


def _digest(path: Path) -> str:
    """Return the digest of a checkpoint's file, and drop the file from the page cache.

    No step needs the file any more, and its memory lets the page cache have huge pages for the panels.
    """
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while part := file.read(BLOCK_BYTES):
            digest.update(part)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return digest.hexdigest()
