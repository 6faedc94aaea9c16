import mmap
import threading

import numpy as np
import pytest
import torch

from decoder.cpu.arena import Arena
from decoder.cuda.arena import ELEMENTS, CudaArena
from decoder.tiny import tiny_config
from kvfs.pages.store import PageStore
from libsym.errors import Invalid, NoSpace
from tests.decoder.bench import ints

CONFIG = tiny_config(num_layers=2, num_kv_heads=1)


@pytest.fixture
def new_arena(device):
    arenas = []

    def new(num_pages: int = 12, num_frames: int = 4, dtype: str = "F32", config=CONFIG) -> CudaArena:
        arenas.append(CudaArena(config, num_pages, num_frames, device, dtype))
        return arenas[-1]

    yield new
    for arena in arenas:
        arena.check()
        arena.close()


def compute(arena: CudaArena, page: int, value: float, *, blank: bool = False) -> None:
    taken = arena.take(ints(page), written=ints(page), blank=ints(page) if blank else ints())
    arena.frames[int(arena.frames_of(ints(page))[0])] = value
    arena.release(taken)


def value_of(arena: CudaArena, page: int) -> float:
    numbers = torch.frombuffer(bytearray(arena.view(page)), dtype=ELEMENTS[arena.dtype]).float()
    assert numbers.min() == numbers.max()
    return float(numbers[0])


def test_an_arena_is_a_page_store_whose_page_has_keys_and_values_entry_by_entry(new_arena):
    store: PageStore = new_arena()
    assert (store.num_pages, store.page_bytes) == (12, 2 * 2 * 32 * 16 * 4)
    assert store.view(3, 2).readonly
    assert not any(store.view(0, 12))
    assert new_arena().layout == "k=entry,dim v=entry,dim"


@pytest.mark.parametrize("dtype", ELEMENTS)
def test_pages_that_were_computed_come_back_and_a_head_is_their_first_entries(new_arena, dtype):
    arena = new_arena(dtype=dtype)
    for page in range(12):
        compute(arena, page, float(page + 1))
    assert arena.num_resident == 4
    assert arena.traffic.num_out == 8
    assert [value_of(arena, page) for page in range(12)] == [float(page + 1) for page in range(12)]
    for entries in (0, 1, 31, 32):
        head = torch.frombuffer(bytearray(arena.masked(arena.view(2), entries)), dtype=ELEMENTS[dtype]).float()
        assert (head.view(2, 2, 1, 32, 16)[..., :entries, :] == 3.0).all()
        assert not head.view(2, 2, 1, 32, 16)[..., entries:, :].any()


def test_zeroing_and_pages_of_which_nothing_is_needed_cost_nothing(new_arena):
    arena = new_arena()
    compute(arena, 2, 3.0)
    arena.zero(2)
    assert arena.num_resident == 0
    arena.writable(3)[:] = b"\1" * arena.page_bytes
    compute(arena, 3, 5.0, blank=True)
    assert arena.traffic.num_in == 0
    assert value_of(arena, 3) == 5.0


def test_frames_that_are_in_use_are_waited_for(new_arena):
    arena = new_arena(num_frames=2)
    compute(arena, 0, 1.0)
    taken = arena.take(ints(0, 1), written=ints(), blank=ints())
    other = threading.Thread(target=compute, args=(arena, 2, 4.0))
    other.start()
    other.join(0.05)
    assert other.is_alive()
    arena.release(taken)
    other.join(10)
    assert not other.is_alive()
    assert (value_of(arena, 0), value_of(arena, 2)) == (1.0, 4.0)


def test_a_page_that_is_on_its_way_into_a_frame_is_waited_for_on_the_device(new_arena):
    arena = new_arena(num_frames=1)
    for page in range(2):
        compute(arena, page, float(page + 1))
    taken = arena.take(ints(0), written=ints(), blank=ints())
    assert taken.marks
    arena.release(taken)


def test_more_pages_than_frames_are_refused_with_both_numbers(new_arena):
    with pytest.raises(NoSpace, match=r"5 pages are needed at once, the GPU has room for 4.*--gpu-memory"):
        new_arena().take(ints(0, 1, 2, 3, 4), written=ints(), blank=ints())


def test_an_element_type_that_there_is_not_is_named(device):
    with pytest.raises(Invalid, match="I8"):
        CudaArena(CONFIG, 1, 1, device, "I8")


def test_expected_pages_are_there_before_they_are_taken(new_arena):
    arena = new_arena(num_frames=2)
    for page in range(3):
        compute(arena, page, float(page + 1))
    arena.expect(ints(0))
    arena.close()  # the thread has done what it was asked
    before = arena.traffic.num_in
    assert before >= 1
    taken = arena.take(ints(0), written=ints(), blank=ints())
    assert arena.traffic.num_in == before
    arena.release(taken)


@pytest.mark.parametrize(("num_layers", "dtype"), [(1, "F8_E4M3"), (3, "BF16"), (2, "F32")])
def test_homes_are_pinned_once_each_from_the_start_of_a_page_of_the_host(new_arena, monkeypatch, num_layers, dtype):
    monkeypatch.setattr("decoder.cuda.arena.SLAB_BYTES", 10_000)
    arena, pinned = new_arena(12, 2, dtype, tiny_config(num_layers=num_layers, num_kv_heads=1)), []
    monkeypatch.setattr(arena.device, "pin", lambda memory: pinned.append((memory.data_ptr(), memory.numel())))
    for page in range(12):
        compute(arena, page, 1.0)
    arena.view(0, 12)
    assert all(address % mmap.PAGESIZE == 0 for address, _ in pinned)
    assert sum(num_bytes for _, num_bytes in pinned) == 12 * arena.page_bytes


def test_entries_are_picked_and_turned_as_on_the_cpu(new_arena):
    config = tiny_config(num_kv_heads=1, window=8, sliding_layers=(True, False), local_rope_theta=100.0)
    cpu, cuda = Arena(config, 6), new_arena(6, 4, config=config)
    rng = np.random.default_rng(1)
    for page in range(3):
        numbers = rng.standard_normal((2, 2, 1, 32, 16), dtype=np.float32)
        cuda.writable(page)[:] = numbers.tobytes()
        keys = numbers[:, 0].swapaxes(2, 3).reshape(2, 1, -1)
        cpu.pages[page] = np.stack((keys, numbers[:, 1].reshape(2, 1, -1)), axis=1)
    sources, slots = ints(*[0] * 5, *[2] * 4, *[1] * 11), ints(*range(3, 8), *range(20, 24), *range(11))
    shifts = ints(*[7] * 5, *[-3] * 4, *[0] * 11)
    for arena in (cpu, cuda):
        arena.assemble(5, sources, slots, shifts)
    got = np.frombuffer(cuda.view(5), np.float32).reshape(2, 2, 1, 32, 16)
    keys = cpu.pages[5][:, 0].reshape(2, 1, 16, 32).swapaxes(2, 3)
    assert np.abs(got[:, 0] - keys).max() < 1e-6
    assert np.array_equal(got[:, 1].reshape(-1), cpu.pages[5][:, 1].reshape(-1))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_any_operations_in_any_order_leave_what_they_leave_in_a_plain_array(new_arena, seed):
    num_pages, num_frames = 10, 4
    arena, rng = new_arena(num_pages, num_frames), np.random.default_rng(seed)
    model = np.zeros((num_pages, 2, 2, 1, 32, 16), np.float32)
    for step in range(150):
        page = int(rng.integers(num_pages))
        match rng.choice(["fill", "zero", "step", "view", "head", "assemble", "expect"]):
            case "fill":
                model[page] = rng.standard_normal(model[page].shape, dtype=np.float32)
                arena.writable(page)[:] = model[page].tobytes()
            case "zero":
                model[page] = 0
                arena.zero(page)
            case "step":
                pages = rng.choice(num_pages, size=rng.integers(1, num_frames + 1), replace=False).astype(np.int32)
                written, blank = pages[:1], pages[:1] if rng.random() < 0.3 else pages[:0]
                arena.expect(pages)
                taken = arena.take(pages, written=written, blank=blank)
                if rng.random() < 0.5:
                    assert bytes(arena.view(int(pages[-1]))) == model[pages[-1]].tobytes() or pages[-1] in blank
                value, slot = float(rng.random()), int(rng.integers(32))
                for each, frame in zip(pages.tolist(), arena.frames_of(pages).tolist(), strict=True):
                    if each in blank:
                        arena.frames[frame] = 0
                        model[each] = 0
                    assert np.array_equal(arena.frames[frame].cpu().numpy(), model[each]), (step, each)
                arena.frames[int(arena.frames_of(written)[0]), :, :, :, slot] = value
                model[written[0], :, :, :, slot] = value
                arena.release(taken)
            case "view":
                count = int(rng.integers(1, num_pages - page + 1))
                assert bytes(arena.view(page, count)) == model[page : page + count].tobytes(), step
            case "head":
                entries = int(rng.integers(33))
                expected = model[page].copy()
                expected[..., entries:, :] = 0
                assert arena.masked(arena.view(page), entries) == expected.tobytes(), step
            case "assemble":
                others = rng.choice([p for p in range(num_pages) if p != page], 2).astype(np.int32)
                sources, slots = rng.choice(others, 20), rng.integers(0, 32, 20).astype(np.int32)
                filled = np.zeros_like(model[page])
                filled[..., :20, :] = model[sources, ..., slots, :].transpose(1, 2, 3, 0, 4)
                arena.assemble(page, sources, slots, np.zeros(20, np.int32))
                model[page] = filled
            case "expect":
                arena.expect(rng.choice(num_pages, 3).astype(np.int32))
        arena.check()
    assert bytes(arena.view(0, num_pages)) == model.tobytes()
