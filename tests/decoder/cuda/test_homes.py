"""Homes are frames of a pool whose pages go to disk and come back: a home holds another page tomorrow."""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from decoder.cuda.arena import CudaArena
from decoder.cuda.device import Device
from decoder.tiny import tiny_config
from kvfs.pages.frames import NOWHERE
from kvfs.pages.looking import Bytes, copies, look
from kvfs.pages.pool import PagePool
from libsym.abi import PAGE_ENTRIES
from tests.decoder.bench import ints
from tests.kvfs.fakes import allocate

ANN, BOB = 1001, 1002
NUM_HOMES, NUM_FRAMES, NUM_PAGES = 6, 3, 24
CONFIG = tiny_config(num_layers=2, num_kv_heads=1)
Numbers = npt.NDArray[np.float32]


class House:
    """A pool over the arena, with a disk that is a dictionary."""

    def __init__(self, device: Device) -> None:
        self.arena = CudaArena(CONFIG, NUM_HOMES, NUM_FRAMES, device, "F32")
        self.pool = PagePool(self.arena, num_on_disk=NUM_PAGES)
        self.pool.cold = self
        self.disk: dict[int, bytes] = {}
        self.model: dict[int, Numbers] = {}
        """Bytes that each page holds."""
        self.owner: dict[int, int] = {}

    # ---- as the storage does it

    def use(self, pages: npt.NDArray[np.int32], what: Callable[..., Any]) -> Any:
        return what([self.disk[page] for page in pages.tolist()])

    def head(self, page: int, data: Bytes, num_entries: int) -> bytes:
        raise AssertionError((page, len(data), num_entries))

    def put_out(self, page: int) -> None:
        frame = int(self.pool.store.of[page])
        self.disk[page] = bytes(self.arena.view(frame))
        self.pool.on_disk.kept[page] = PAGE_ENTRIES
        self.pool.drop_frames(ints(page))

    def bring(self, page: int) -> None:
        frames = self.pool.take_frames(1)
        self.arena.writable(int(frames[0]))[:] = self.disk[page]
        self.pool.end_bringing(ints(page), frames, self.owner[page])

    # ---- as a call does it

    def make(self, owner: int) -> int:
        """A new page: of zeros where others' bytes were in its home, else whatever the owner left there."""
        (page,) = allocate(self.pool, 1, owner).tolist()
        self.pool.fill[page] = PAGE_ENTRIES
        self.owner[page] = owner
        return page

    def compute(self, pages: Sequence[int], written: int, value: float, *, is_new: bool = False) -> None:
        """A step that looks at all of these and writes one of them whole."""
        pinned = ints(*pages)
        self.pool.pin(pinned)
        homes = self.pool.store.frames_of(pinned)
        home = self.pool.store.frames_of(ints(written))
        taken = self.arena.take(homes, written=home, blank=home if is_new else ints())
        for page, frame in zip(pages, self.arena.frames_of(homes).tolist(), strict=True):
            if page != written:
                assert np.array_equal(self.arena.frames[frame].cpu().numpy(), self.model[page]), page
        frame = int(self.arena.frames_of(home)[0])
        self.arena.frames[frame] = value
        self.model[written] = self.arena.frames[frame].cpu().numpy().copy()
        for column in (self.pool.on_disk.kept, self.pool.on_disk._stable):
            column[written] = 0  # as the core does it, where entries are overwritten
        self.arena.release(taken)
        self.pool.unpin(pinned)

    def expect(self, pages: Sequence[int]) -> None:
        self.arena.expect(self.pool.store.frames_of(ints(*pages)))

    def here(self) -> list[int]:
        return [page for page in self.model if self.pool.store.of[page] != NOWHERE]

    def check(self) -> None:
        self.arena.check()
        pages = list(self.model)
        found = look(self.pool.store, self.pool.cold, ints(*pages), copies)
        for page, data in zip(pages, found, strict=True):
            assert data == self.model[page].tobytes(), page


@pytest.fixture
def house(device: Device) -> Iterator[House]:
    house = House(device)
    yield house
    house.arena.close()
    house.arena.check()


def test_a_hint_for_a_page_that_went_brings_nothing_of_the_page_that_came(house: House) -> None:
    first, second = house.make(ANN), house.make(ANN)
    for page in (first, second):
        house.compute([page], page, float(page + 1), is_new=True)
    fillers = [house.make(ANN) for _ in range(NUM_FRAMES)]  # so that the two have no frame on the device
    for page in fillers:
        house.compute([page], page, 7.0, is_new=True)
    house.put_out(second)
    home = int(house.pool.store.of[first])
    with house.arena._changed:  # the hint can't be followed yet
        house.expect([first])
        house.put_out(first)
        frames = house.pool.take_frames(house.pool.num_free_frames)
        assert home in frames
        half_read = house.arena.writable(home)
        half_read[:100] = bytes(100)
    house.arena.close()  # the thread has done what it was asked
    assert house.arena._residency.frame_of[home] < 0
    house.pool.return_frames(frames)
    house.check()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_pages_keep_their_bytes_whatever_goes_down_and_comes_back(house: House, seed: int) -> None:
    rng = np.random.default_rng(seed)
    is_over, problems = threading.Event(), list[BaseException]()

    def watch() -> None:
        """A worker that reads images: of pages that stay as they are, here."""
        try:
            while not is_over.is_set():
                pages = ints(*stable)
                data = look(house.pool.store, house.pool.cold, pages, copies)
                assert data == [house.model[page].tobytes() for page in stable]
        except BaseException as error:  # noqa: BLE001 - told below
            problems.append(error)

    stable = []
    for value in range(3):
        stable.append(house.make(ANN))
        house.compute([stable[-1]], stable[-1], float(value), is_new=True)
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for step in range(250):
            here = house.here()
            match rng.choice(["make", "out", "in", "compute", "expect", "remove"]):
                case "make" if house.pool.num_free_frames and len(house.model) < NUM_PAGES:
                    page = house.make(int(rng.choice([ANN, BOB])))
                    house.compute([page], page, float(step), is_new=True)
                case "out" if here:
                    house.put_out(int(rng.choice(here)))
                case "in" if house.pool.num_free_frames:
                    away = [page for page in house.model if page not in here]
                    if away:
                        house.bring(int(rng.choice(away)))
                case "compute" if set(here) - set(stable):
                    written = int(rng.choice(sorted(set(here) - set(stable))))
                    others = rng.choice(here, min(len(here), NUM_FRAMES - 1), replace=False).tolist()
                    house.compute(sorted({*others, written}), written, float(step))
                case "expect" if here:
                    house.expect(here)
                case "remove" if len(house.model) > 10:
                    page = int(rng.choice(sorted(set(house.model) - set(stable))))
                    del house.model[page]
                    house.pool.release(ints(page), house.owner[page])
            house.arena.check()
    finally:
        is_over.set()
        watcher.join()
    assert not problems
    house.check()
