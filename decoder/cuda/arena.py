"""The KV arena on the device: every page has a home in host memory, and pages in use have a device frame.

A page's bytes are in one of three places:

    zeros      nowhere: the page reads as zeros, whatever its home holds
    home       in its home; if the page has a frame, too, the frame is clean: it has the same bytes
    frame      in its frame, which is dirty: the home is out of date

In this module, a *page* is a home: one of the frames of `kvfs.pages`. There are as many homes as KV memory has room
for. Once the contents of a home are on disk, the home is reused for other contents. The thread that moves contents to
disk reads them by `view`, which brings the home up to date. New contents begin with `writable` (from disk) or with
`zero`. Alternatively, the home keeps old bytes of the same account, and a step overwrites these bytes. `writable` and
`zero` free the page's device frame, and drop hints about the page. When the first home of a slab is copied, the whole
slab is page-locked for good. So locked memory never exceeds KV memory, however many pages are moved.

The homes are one mapping without reservation, page after page. So `view` returns pages without a copy, and unused pages
cost nothing. A dirty frame is written back before another page gets it.

A page is contiguous in both memories, so the copy engines move it. They take no multiprocessor from a running step.
There are three streams. One stream copies pages to the device, and another copies pages to the host, because the link
is full duplex. `assemble` runs on the third stream. The host waits only in `view`, `writable` (for bytes in flight) and
`assemble`. The step's stream waits only for the marks of pages that the step uses.

Threads: the trio thread calls `view`, `zero` and `expect`. Workers call `view`, `writable` and `assemble`. The thread
`aside` calls `zero`. The step thread calls `take` and `release`. The arena's own thread brings expected pages. One lock
guards the state. A thread that holds the lock never waits for the device, with one exception: a write-back must end
before the host writes to the same home. Four rules keep pages intact:

- Kernels touch pinned frames only. The step that pinned a frame releases it after the device is done.
- A page that a step writes is dirty from `take` on. A `view` before `release` copies the page (entries below the
  table's length do not change), and the page stays dirty.
- Order on the device: a page is copied into a frame after the frame's old page was copied out. A page is copied out
  after it was copied in. A home is read after it was written. For each of these, a stream waits for a mark.
- A hint may name a page that has been freed since. `zero` and `writable` increment the page's epoch, and hints from an
  older epoch are dropped.
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
"""Element types of KV, by safetensors name."""

SLAB_BYTES = 16 << 20
"""Approximate size of a slab, the unit in which homes are pinned. Pinning a slab takes some milliseconds. Slabs are
small, so that little unused memory is pinned."""

_MAP_NORESERVE = 0x4000
_ZEROS, _HOME, _FRAME = 0, 1, 2
"""Places of a page's bytes, which the module's docstring describes."""
_MANY_MARKS = 256
"""With more marks than this, the arena drops finished marks."""


@dataclass(frozen=True, slots=True)
class PinnedPages:
    """Pages that the device computes with, pinned in their frames until `release`."""

    frames: npt.NDArray[np.intp]
    written: IntArray
    """Frames that the device writes."""
    marks: tuple[Mark, ...]
    """Marks that the device must pass before it may touch the frames."""


@dataclass(slots=True)
class Traffic:
    """Counts of pages that moved since the start."""

    num_in: int = 0
    num_out: int = 0


class CudaArena:
    """`num_pages` pages of KV; `num_frames` of them fit on the device at a time."""

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
        # A slab ends at a page boundary of host memory: CUDA cannot pin a page of host memory twice.
        together = mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, self._page_bytes)
        self._pages_per_slab = max(1, SLAB_BYTES // (together * self._page_bytes)) * together
        self._is_pinned = np.zeros(-(-num_pages // self._pages_per_slab), np.bool_)
        # Each layer's kind of rotation, and the frequencies of each kind.
        local = [config.slides(layer) and bool(config.local_rope_theta) for layer in range(config.num_layers)]
        self._layer_kinds = [int(kind) for kind in local]
        self._frequencies = [inverse_frequencies(config, bool(kind)) for kind in range(max(self._layer_kinds) + 1)]

        self._changed = threading.Condition(threading.RLock())
        """Guards all fields below. Waiters are notified when frames are released."""
        self._residency = Residency(num_pages, num_frames)
        self._where = np.full(num_pages, _ZEROS, np.int8)
        self._epoch = np.zeros(num_pages, np.int64)
        self._arriving: dict[int, Mark] = {}
        """Marks by frame. A frame has its page's bytes once the device has passed the mark."""
        self._leaving: dict[int, Mark] = {}
        """Marks by page. A page's home has its bytes once the device has passed the mark."""
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
        """Return the counts of frames, of resident pages, and of moved pages. Programs do not see these counts."""
        return {
            "num_frames": self.num_frames,
            "num_resident_pages": self.num_resident,
            "num_pages_in": self.traffic.num_in,
            "num_pages_out": self.traffic.num_out,
        }

    def close(self) -> None:
        """End the arena's thread. Later hints have no effect."""
        self._expected.put(None)
        self._bringer.join()

    # ---- as a page store

    def view(self, page: int, count: int = 1) -> memoryview:
        """Bring the homes of `count` consecutive pages up to date, and return their bytes, read-only."""
        assert 0 <= page <= page + count <= self._num_pages, (page, count, self._num_pages)
        with self._changed:
            marks = [self._bring_home(each) for each in range(page, page + count)]
        for mark in marks:
            self.device.finish(mark)
        return self._home_bytes(page, count).toreadonly()

    def writable(self, page: int) -> memoryview:
        """Return the bytes of one page, to be overwritten whole. No other caller may be using the page."""
        assert 0 <= page < self._num_pages, (page, self._num_pages)
        with self._changed:
            self._forget(page)
            self._where[page] = _HOME
            self.device.finish(self._leaving.pop(page, None))
        return self._home_bytes(page, 1)

    def zero(self, page: int) -> None:
        """Fill one page with zeros. The zeros are written when a step or a reader needs the page."""
        assert 0 <= page < self._num_pages, (page, self._num_pages)
        with self._changed:
            self._forget(page)
            self._where[page] = _ZEROS

    def masked(self, data: memoryview, num_entries: int) -> bytes:
        """Return a copy of a page's bytes in which every entry from `num_entries` on is zero."""
        assert 0 <= num_entries <= PAGE_ENTRIES, num_entries
        copied = np.frombuffer(data, np.uint8).copy()
        copied.reshape(self._head_shape)[:, num_entries:] = 0
        return copied.tobytes()

    def assemble(self, target: int, sources: IntArray, slots: IntArray, shifts: IntArray) -> None:
        """Fill a page: copy entry `slots[i]` of page `sources[i]` to entry i, moved up by `shifts[i]` positions."""
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

    # ---- for steps and assemblies

    def take(self, pages: IntArray, *, written: IntArray, blank: IntArray) -> PinnedPages:
        """Pin distinct pages in frames. Wait while other steps and assemblies have too many frames pinned.

        `written` has the pages that the caller will write. `blank` has the pages whose old bytes the caller does not
        need: pages without a frame are zeroed. NoSpace: there are fewer frames than pages.
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
            # There may be thousands of frames. numpy is twice as fast with indices of its own type.
            frames = residency.frame_of.take(pages).astype(np.intp)
            written_frames = residency.frame_of[written]
            residency.num_pins[frames] += 1
            residency.num_writers[written_frames] += 1
            self._where[written] = _FRAME
            return PinnedPages(frames, written_frames, self._marks_of(frames))

    def _marks_of(self, frames: npt.NDArray[np.intp]) -> tuple[Mark, ...]:
        """Return marks. When the device has passed them, all these frames have their pages' bytes."""
        if not self._arriving:
            return ()
        is_taken = np.zeros(self.num_frames, np.bool_)
        is_taken[frames] = True
        return tuple({mark for frame, mark in self._arriving.items() if is_taken[frame]})

    def release(self, taken: PinnedPages) -> None:
        """Unpin the pages of a `take`. The device must be done with them."""
        with self._changed:
            self._residency.num_pins[taken.frames] -= 1
            self._residency.num_writers[taken.written] -= 1
            for frame in [frame for frame, mark in self._arriving.items() if self.device.is_over(mark)]:
                del self._arriving[frame]
            if len(self._leaving) > _MANY_MARKS:
                for page in [page for page, mark in self._leaving.items() if self.device.is_over(mark)]:
                    del self._leaving[page]
            self._changed.notify_all()

    def wait_for(self, taken: PinnedPages, stream: Stream) -> None:
        """Make later launches on this stream wait until the pages are in their frames."""
        for mark in taken.marks:
            self.device.wait(stream, mark)

    def frames_of(self, pages: IntArray) -> IntArray:
        """Return the frames of pages that a `take` has pinned."""
        frames: IntArray = self._residency.frame_of.take(pages)
        return frames

    def expect(self, pages: IntArray) -> None:
        """Queue a hint that these pages will be needed soon. The method does not wait."""
        away = pages[self._is_away(pages)]
        if len(away):
            self._expected.put((away, self._epoch[away]))

    def _is_away(self, pages: IntArray) -> npt.NDArray[np.bool_]:
        """Return which pages have bytes, but no frame."""
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
        """Give these pages frames, and start their copies. False: too few frames can be evicted now."""
        placed = self._residency.place(pages, only_if_old=only_if_old)
        if placed is None:
            return False
        if not len(placed.arrivals):
            return True
        try:
            self._move(placed, blank)
        except BaseException:
            for page in placed.arrivals.tolist():  # the frames lack these pages' bytes
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
        """Start to write back the dirty pages among the pages that lose their frames."""
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
        """Bring a page's home up to date. Return the mark after which the home has the bytes."""
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
        """Free a page's frame without a write-back, and cancel the hints about the page."""
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
        """Raise AssertionError if the arena's state contradicts itself."""
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
