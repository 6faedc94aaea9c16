"""The KV arena on the device: every page has a home in host memory, those in use have a frame on the device.

Where a page's bytes are:

    zeros      nowhere: it reads as zeros, whatever its home holds
    home       in its home; if it has a frame as well, that is the same (clean)
    frame      in its frame; the home is behind (dirty)

A *page* of the arena is a home: one of the frames of `kvfs.pages`, of which there are as many as KV memory has room
for. It holds another page of a file tomorrow, when the one of today is on disk. So whoever takes a page to disk reads
it by `view`, which brings its home up to date. The next one gets a home by `writable` (from disk), by `zero`, or as it
is, with its own account's bytes, to be written by a step. The first two take the frame of the old one away, and drop
hints about it. Homes are page-locked when the first of a slab moves, and stay so: no more of them than KV memory,
whatever passes through.

The home is one mapping without reservation, page after page, so `view` gives out pages without a copy, and an arena
larger than memory costs nothing until it is used. A frame that is taken away is written back if it is dirty.

A page is one blob in both places, so the copy engines move it: no multiprocessor is taken from the step that runs
beside it. Three streams: pages come in on one, go out on another (the link is full duplex), entries are picked
together on the third. Nothing waits on the host but `view`, `head`, `writable` (for bytes on their way) and
`assemble`; the step's stream waits for marks of those pages alone that it needs.

Threads. The trio thread calls `view`, `zero` and `expect`; workers `view`, `head`, `writable` and `assemble`; the
thread beside the run `zero`, the step's `take` and `release`; a thread of the arena's own brings what was expected. One
lock is around the state. No thread waits for the device while it holds the lock, but for a write-back that the host's
next write to the same home has to follow. What makes it sound:

- Kernels touch pinned frames only, and the step that pinned them releases them after the device is done.
- A page that a step writes is dirty from `take` on, and stays so: a view meanwhile copies what is there (slots below
  the table's length do not change) and does not call the frame clean.
- Order on the device: a frame comes in after what it held has gone out; a page goes out after it came in; a home is
  read after it was written. Each is a mark that a stream waits for.
- A page that was given back may be expected still: `zero` and `writable` count its epoch, and old hints are dropped.
"""

from __future__ import annotations

import logging
import math
import mmap
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from decoder.batch import IntArray
from decoder.cuda.device import Device, Mark, Stream
from decoder.cuda.residency import Placement, Residency
from decoder.memory import advise_huge_pages
from decoder.model_config import ModelConfig
from decoder.rope import inverse_frequencies
from libsym.abi import PAGE_ENTRIES
from libsym.errors import Invalid, NoSpace
from triton_kernels.page_copy import zero_pages
from triton_kernels.page_rebase import assemble_pages

log = logging.getLogger(__name__)

ELEMENTS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F8_E4M3": torch.float8_e4m3fn}
"""Element types of KV by the names that safetensors gives them."""

SLAB_BYTES = 16 << 20
"""Homes are pinned in pieces of about this size: some milliseconds each, and little more memory than is used."""

_MAP_NORESERVE = 0x4000
_ZEROS, _HOME, _FRAME = 0, 1, 2
"""Where a page's bytes are: see above."""
_MANY_MARKS = 256
"""Marks that are over are dropped when there are more."""


@dataclass(frozen=True, slots=True)
class Taken:
    """Pages that somebody computes with, pinned in their frames until `release`."""

    frames: npt.NDArray[np.intp]
    written: IntArray
    """Frames that are written."""
    marks: tuple[Mark, ...]
    """What has to be over before the device may touch them."""


@dataclass(slots=True)
class Traffic:
    """Pages moved since the start."""

    num_in: int = 0
    num_out: int = 0


class CudaArena:
    """`num_pages` pages of KV of which `num_frames` are on the device at a time."""

    def __init__(
        self, config: ModelConfig, num_pages: int, num_frames: int, device: Device, dtype: str = "BF16"
    ) -> None:
        if dtype not in ELEMENTS:
            raise Invalid(f"KV dtype {dtype!r} is not supported on the GPU: use one of {', '.join(ELEMENTS)}")
        if num_pages < 1 or num_frames < 1:
            raise Invalid(f"an arena of {num_pages} pages and {num_frames} frames cannot hold anything")
        num_frames = min(num_frames, num_pages)
        self.layout: str = "k=entry,dim v=entry,dim"
        self.dtype: str = dtype
        """The safetensors name of the element type."""
        self.device = device
        self.traffic = Traffic()
        self._num_pages = num_pages
        self._page_bytes = PAGE_ENTRIES * config.entry_bytes(dtype)
        shape = (config.num_layers, 2, config.num_kv_heads, PAGE_ENTRIES, config.head_dim)
        self.frames = torch.zeros((num_frames, *shape), dtype=ELEMENTS[dtype], device=device.torch)
        """[num_frames, layers, 2, kv_heads, 32, head_dim] on the device."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._map = mmap.mmap(-1, num_pages * self._page_bytes, flags=flags)
        advise_huge_pages(self._map)
        self._bytes = memoryview(self._map)
        self._home = torch.frombuffer(self._map, dtype=torch.uint8).view(num_pages, self._page_bytes)
        self._frame_bytes = self.frames.view(num_frames, -1).view(torch.uint8)
        self._head_shape = (config.num_layers * 2 * config.num_kv_heads, PAGE_ENTRIES, -1)
        # A slab ends where a page of the host's memory does: none of these can be pinned twice.
        together = mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, self._page_bytes)
        self._pages_per_slab = max(1, SLAB_BYTES // (together * self._page_bytes)) * together
        self._is_pinned = np.zeros(-(-num_pages // self._pages_per_slab), np.bool_)
        # A page's kind of rotation, and how fast each kind turns.
        local = [config.slides(layer) and bool(config.local_rope_theta) for layer in range(config.num_layers)]
        self._layer_kinds = [int(kind) for kind in local]
        self._frequencies = [inverse_frequencies(config, bool(kind)) for kind in range(max(self._layer_kinds) + 1)]

        self._changed = threading.Condition(threading.RLock())
        """Around everything below; notified when frames are released."""
        self._residency = Residency(num_pages, num_frames)
        self._where = np.full(num_pages, _ZEROS, np.int8)
        self._epoch = np.zeros(num_pages, np.int64)
        self._arriving: dict[int, Mark] = {}
        """By frame: when its bytes are there."""
        self._leaving: dict[int, Mark] = {}
        """By page: when its home is written."""
        self._last_out: Mark = None
        self._in, self._out, self._assembling = device.stream(), device.stream(), device.stream()
        self._expected: queue.SimpleQueue[tuple[IntArray, npt.NDArray[np.int64]] | None] = queue.SimpleQueue()
        self._bringer = threading.Thread(target=self._bring_expected, name="swap", daemon=True)
        self._bringer.start()

    @property
    def num_pages(self) -> int:
        return self._num_pages

    @property
    def page_bytes(self) -> int:
        return self._page_bytes

    @property
    def num_frames(self) -> int:
        return self._residency.num_frames

    @property
    def num_resident(self) -> int:
        return self._residency.num_resident

    def statistics(self) -> dict[str, int]:
        """What moved, and what is where; a program's own view of its pages does not show it."""
        return {
            "num_frames": self.num_frames,
            "num_resident_pages": self.num_resident,
            "num_pages_in": self.traffic.num_in,
            "num_pages_out": self.traffic.num_out,
        }

    def close(self) -> None:
        """End the arena's thread; nothing is brought ahead after."""
        self._expected.put(None)
        self._bringer.join()

    # ---- as a page store

    def view(self, page: int, count: int = 1) -> memoryview:
        """The bytes of `count` consecutive pages, to be read; their homes are brought up to date first."""
        assert 0 <= page <= page + count <= self._num_pages, (page, count, self._num_pages)
        with self._changed:
            marks = [self._bring_home(each) for each in range(page, page + count)]
        for mark in marks:
            self.device.finish(mark)
        return self._home_bytes(page, count).toreadonly()

    def writable(self, page: int) -> memoryview:
        """The bytes of one page that nobody else knows, to be overwritten whole."""
        assert 0 <= page < self._num_pages, (page, self._num_pages)
        with self._changed:
            self._forget(page)
            self._where[page] = _HOME
            self.device.finish(self._leaving.pop(page, None))
        return self._home_bytes(page, 1)

    def zero(self, page: int) -> None:
        """Fill one page with zeros: nothing is written until somebody needs them."""
        assert 0 <= page < self._num_pages, (page, self._num_pages)
        with self._changed:
            self._forget(page)
            self._where[page] = _ZEROS

    def masked(self, data: memoryview, num_entries: int) -> bytes:
        """A copy of a page's bytes in which every slot from `num_entries` on reads as zero."""
        assert 0 <= num_entries <= PAGE_ENTRIES, num_entries
        copied = np.frombuffer(data, np.uint8).copy()
        copied.reshape(self._head_shape)[:, num_entries:] = 0
        return copied.tobytes()

    def assemble(self, target: int, sources: IntArray, slots: IntArray, shifts: IntArray) -> None:
        """Fill a page: its slot i becomes slot `slots[i]` of page `sources[i]`, moved up by `shifts[i]` positions."""
        assert 0 <= target < self._num_pages, (target, self._num_pages)
        assert 0 < len(sources) == len(slots) == len(shifts) <= PAGE_ENTRIES, (sources, slots, shifts)
        assert 0 <= sources.min() <= sources.max() < self._num_pages, sources
        assert 0 <= slots.min() <= slots.max() < PAGE_ENTRIES, slots
        needed, written = np.unique(np.append(sources, target)).astype(np.int32), np.array([target], np.int32)
        taken = self.take(needed, written=written, blank=written)
        try:
            with self.device.on(self._assembling):
                self.wait_for(taken, self._assembling)
                frames = self.frames_of(np.append(sources, target))
                self._assemble_frames(int(frames[-1]), frames[:-1], slots, shifts)
                mark = self.device.mark(self._assembling)
            self.device.finish(mark)
        finally:
            self.release(taken)

    def _assemble_frames(self, target: int, sources: IntArray, slots: IntArray, shifts: IntArray) -> None:
        padded = np.zeros((3, 1, PAGE_ENTRIES), np.int32)
        for row, values in zip(padded, (sources, slots, shifts), strict=True):
            row[0, : len(values)] = values
        assemble_pages(
            self.frames,
            np.array([target], np.int32),
            padded[0],
            padded[1],
            padded[2],
            np.array([len(sources)], np.int32),
            self._frequencies,
            self._layer_kinds,
        )

    # ---- for those who compute

    def take(self, pages: IntArray, *, written: IntArray, blank: IntArray) -> Taken:
        """Pin pages (none twice) in frames; waits while others have too many pinned.

        `written`: of these, pages that will be written; `blank`: pages of which nothing is needed, that are zeroed if
        they are not on the device. NoSpace: there are fewer frames than pages.
        """
        if len(pages) > self.num_frames:
            raise NoSpace(
                f"{len(pages)} pages are needed at once, the GPU has room for {self.num_frames}: shorten the file, or "
                "start the daemon with more --gpu-memory"
            )
        with self._changed:
            while not self._place(pages, blank):
                self._changed.wait()
            residency = self._residency
            # Thousands of them, and numpy is twice as fast with indices of its own type.
            frames = residency.frame_of.take(pages).astype(np.intp)
            written_frames = residency.frame_of[written]
            residency.num_pins[frames] += 1
            residency.num_writers[written_frames] += 1
            self._where[written] = _FRAME
            return Taken(frames, written_frames, self._marks_of(frames))

    def _marks_of(self, frames: npt.NDArray[np.intp]) -> tuple[Mark, ...]:
        """When the last of these frames' bytes are there."""
        if not self._arriving:
            return ()
        is_taken = np.zeros(self.num_frames, np.bool_)
        is_taken[frames] = True
        return tuple({mark for frame, mark in self._arriving.items() if is_taken[frame]})

    def release(self, taken: Taken) -> None:
        """What was taken is no longer in use: the device is done with it."""
        with self._changed:
            self._residency.num_pins[taken.frames] -= 1
            self._residency.num_writers[taken.written] -= 1
            for frame in [frame for frame, mark in self._arriving.items() if self.device.is_over(mark)]:
                del self._arriving[frame]
            if len(self._leaving) > _MANY_MARKS:
                for page in [page for page, mark in self._leaving.items() if self.device.is_over(mark)]:
                    del self._leaving[page]
            self._changed.notify_all()

    def wait_for(self, taken: Taken, stream: Stream) -> None:
        """What is launched on this stream from here on finds the pages in their frames."""
        for mark in taken.marks:
            self.device.wait(stream, mark)

    def frames_of(self, pages: IntArray) -> IntArray:
        """Of pages that are taken."""
        frames: IntArray = self._residency.frame_of.take(pages)
        return frames

    def expect(self, pages: IntArray) -> None:
        """A hint that these pages will be needed soon; returns at once."""
        away = pages[self._is_away(pages)]
        if len(away):
            self._expected.put((away, self._epoch[away]))

    def _is_away(self, pages: IntArray) -> npt.NDArray[np.bool_]:
        """Which pages have bytes, and no frame."""
        away: npt.NDArray[np.bool_] = (self._where[pages] == _HOME) & (self._residency.frame_of[pages] < 0)
        return away

    def _bring_expected(self) -> None:
        while (hint := self._expected.get()) is not None:
            pages, epochs = hint
            try:
                with self._changed:
                    same = (self._epoch[pages] == epochs) & self._is_away(pages)
                    self._place(np.unique(pages[same]), _NO_PAGES, only_if_old=True)
            except Exception:
                log.exception("pages could not be brought ahead; they come when they are needed")

    # ---- moving, under the lock

    def _place(self, pages: IntArray, blank: IntArray, *, only_if_old: bool = False) -> bool:
        """Give these pages frames and start what has to move; False: not now."""
        placed = self._residency.place(pages, only_if_old=only_if_old)
        if placed is None:
            return False
        if not len(placed.arrivals):
            return True
        try:
            self._move(placed, blank)
        except BaseException:
            for page in placed.arrivals.tolist():  # their frames hold nothing of them
                self._residency.drop(page)
            raise
        return True

    def _move(self, placed: Placement, blank: IntArray) -> None:
        self._write_back(placed.evicted.tolist(), placed.evicted_frames.tolist())
        is_blank = (self._where[placed.arrivals] == _ZEROS) | np.isin(placed.arrivals, blank)
        with self.device.on(self._in):
            self.device.wait(self._in, self._last_out)
            coming = placed.arrivals[~is_blank].tolist()
            for page, frame in zip(coming, placed.frames[~is_blank].tolist(), strict=True):
                self._pin_home(page)
                self.device.wait(self._in, self._leaving.get(page))
                self._frame_bytes[frame].copy_(self._home[page], non_blocking=True)
            self._zero_frames(placed.frames[is_blank])
            mark = self.device.mark(self._in)
        self._where[placed.arrivals[is_blank]] = _FRAME
        self._arriving.update(dict.fromkeys(placed.frames.tolist(), mark))
        self.traffic.num_in += len(coming)

    def _zero_frames(self, frames: IntArray) -> None:
        if len(frames):
            zero_pages(self.frames, self.device.upload(torch.from_numpy(frames)))

    def _write_back(self, pages: Sequence[int], frames: Sequence[int]) -> None:
        """Let pages go out of the frames that are taken away from them."""
        for page, frame in zip(pages, frames, strict=True):
            if self._where[page] == _FRAME:
                self._send_home(page, frame)
                self._where[page] = _HOME
            self._arriving.pop(frame, None)

    def _send_home(self, page: int, frame: int) -> Mark:
        """Start a copy of a frame into the page's home."""
        self._pin_home(page)
        with self.device.on(self._out, kernels=False):
            self.device.wait(self._out, self._arriving.get(frame))
            self._home[page].copy_(self._frame_bytes[frame], non_blocking=True)
            self._leaving[page] = self._last_out = self.device.mark(self._out)
        self.traffic.num_out += 1
        return self._last_out

    def _bring_home(self, page: int) -> Mark:
        """Have a page's home hold what the page holds; when it does."""
        if self._where[page] == _ZEROS:
            self.device.finish(self._leaving.pop(page, None))
            self._home[page] = 0
            frame = int(self._residency.frame_of[page])
            assert frame < 0, f"page {page} has no bytes, and frame {frame}"
            self._where[page] = _HOME
        elif self._where[page] == _FRAME:
            frame = int(self._residency.frame_of[page])
            mark = self._send_home(page, frame)
            if not self._residency.num_writers[frame]:
                self._where[page] = _HOME
            return mark
        return self._leaving.get(page)

    def _forget(self, page: int) -> None:
        """Whatever a page held is not needed any more."""
        self._residency.drop(page)
        self._epoch[page] += 1

    def _home_bytes(self, page: int, count: int) -> memoryview:
        return self._bytes[page * self._page_bytes : (page + count) * self._page_bytes]

    def _pin_home(self, page: int) -> None:
        slab = page // self._pages_per_slab
        if not self._is_pinned[slab]:
            self._is_pinned[slab] = True
            self.device.pin(self._home[slab * self._pages_per_slab : (slab + 1) * self._pages_per_slab])

    def check(self) -> None:
        """Raise AssertionError if the books contradict themselves."""
        with self._changed:
            self._residency.check()
            without_frame = self._residency.frame_of < 0
            lost = np.flatnonzero(without_frame & (self._where == _FRAME))
            if lost.size:
                raise AssertionError(f"pages {lost[:8]} are said to be on the device, and have no frame")
            odd = np.flatnonzero(~without_frame & (self._where == _ZEROS))
            if odd.size:
                raise AssertionError(f"pages {odd[:8]} have a frame, and no bytes")


_NO_PAGES: npt.NDArray[Any] = np.empty(0, np.int32)
