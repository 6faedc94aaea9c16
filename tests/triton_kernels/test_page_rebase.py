"""Pages put together from others against numpy in float64, and against the CPU's own way."""

import numpy as np
import pytest
import torch

from libsym.abi import PAGE_ENTRIES
from triton_kernels.page_rebase import assemble_pages

pytestmark = pytest.mark.slow

# A turned key is rounded once, to its own type; the keys are of about 1, the largest of 5.
ABSOLUTE_ERROR = {torch.float32: 2e-6, torch.float16: 2.5e-3, torch.bfloat16: 2e-2, torch.float8_e4m3fn: 0.3}
LAYERS, KV_HEADS = 3, 2


def random_pages(num_frames: int, head_dim: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    shape = (num_frames, LAYERS, 2, KV_HEADS, PAGE_ENTRIES, head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype).to(device)


def random_lists(seed: int, targets, counts, frames, shifts) -> dict[str, np.ndarray]:
    """Pick entries from anywhere for each target. Entries past a target's count must not be read."""
    rng, size = np.random.default_rng(seed), (len(targets), PAGE_ENTRIES)
    lists = {
        "sources": rng.choice(frames, size),
        "slots": rng.integers(0, PAGE_ENTRIES, size),
        "shifts": rng.choice(shifts, size),
    }
    past = np.arange(PAGE_ENTRIES) >= np.array(counts)[:, None]
    for numbers in lists.values():
        numbers[past] = 2**31 - 1
    lists |= {"targets": np.array(targets), "counts": np.array(counts)}
    return {name: numbers.astype(np.int32) for name, numbers in lists.items()}


def reference(pages: torch.Tensor, lists, frequencies, kinds) -> torch.Tensor:
    before = pages.cpu().float().double().numpy()
    after, half = before.copy(), pages.shape[5] // 2
    for index, target in enumerate(lists["targets"]):
        after[target] = 0.0
        for entry in range(lists["counts"][index]):
            source, slot, shift = (int(lists[name][index, entry]) for name in ("sources", "slots", "shifts"))
            after[target, :, :, :, entry] = before[source, :, :, :, slot]
            for layer in range(LAYERS):
                angles = shift * frequencies[kinds[layer]]
                key = before[source, layer, 0, :, slot]
                first, second = key[:, :half], key[:, half:]
                after[target, layer, 0, :, entry, :half] = first * np.cos(angles) - second * np.sin(angles)
                after[target, layer, 0, :, entry, half:] = second * np.cos(angles) + first * np.sin(angles)
    return torch.from_numpy(after)


def plain_frequencies(head_dim: int, theta: float = 10_000.0) -> np.ndarray:
    return theta ** (-np.arange(0, head_dim, 2) / head_dim)


@pytest.mark.parametrize("dtype", ABSOLUTE_ERROR, ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 80])
def test_entries_move_and_keys_turn_as_far(device, head_dim, dtype):
    pages = random_pages(9, head_dim, dtype, device)
    lists = random_lists(1, [8, 0, 3], [32, 1, 31], [1, 2, 4, 5], [0, 7, -4097, 100_000])
    frequencies = [plain_frequencies(head_dim), plain_frequencies(head_dim, 1e6)]
    expected = reference(pages, lists, frequencies, [0, 1, 0])
    assemble_pages(pages, **lists, frequencies=frequencies, layer_kinds=[0, 1, 0])
    actual = pages.cpu().float().double()
    torch.testing.assert_close(actual, expected, rtol=0, atol=ABSOLUTE_ERROR[dtype])
    assert torch.equal(actual[:, :, 1], expected[:, :, 1])
    assert torch.equal(actual[[1, 2, 4, 5, 6, 7]], expected[[1, 2, 4, 5, 6, 7]])


@pytest.mark.parametrize("dtype", ABSOLUTE_ERROR, ids=str)
def test_entries_that_do_not_move_keep_their_bits(device, dtype):
    pages = random_pages(3, 16, dtype, device)
    pages[0, 0, 0, 0, :4, 0] = -0.0
    lists = random_lists(2, [2], [32], [0, 1], [0])
    assemble_pages(pages, **lists, frequencies=[plain_frequencies(16)], layer_kinds=[0] * LAYERS)
    stored = pages.view(torch.uint8)
    for entry in range(PAGE_ENTRIES):
        source, slot = lists["sources"][0, entry], lists["slots"][0, entry]
        assert torch.equal(stored[2, :, :, :, entry], stored[int(source), :, :, :, int(slot)])


def test_float8_keys_that_turn_out_of_range_are_held_within_it(device):
    pages = random_pages(2, 16, torch.float32, device).fill_(448.0).to(torch.float8_e4m3fn)
    lists = random_lists(3, [1], [32], [0], [1])
    assemble_pages(pages, **lists, frequencies=[plain_frequencies(16)], layer_kinds=[0] * LAYERS)
    assert pages.float().isfinite().all()
    assert pages[1].float().max() == 448.0


def test_a_target_of_minus_one_is_left_out(device):
    pages = random_pages(3, 16, torch.float32, device)
    before = pages.clone()
    lists = random_lists(4, [-1], [32], [0], [5])
    assemble_pages(pages, **lists, frequencies=[plain_frequencies(16)], layer_kinds=[0] * LAYERS)
    assert torch.equal(pages, before)
