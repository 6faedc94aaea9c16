"""Passes of decodes laid out ahead: nothing differs from laying them out anew, and little is left to do then."""

import numpy as np

from decoder.batch import Chunk
from decoder.cuda.decode_layout import DecodeLayout
from decoder.cuda.memory_plan import MAX_SPLITS
from decoder.cuda.passes import ChunkRows, Pass
from triton_kernels.attention_splits import SPLIT_PAGES

NUM_PAGES = 2000


class File:
    def __init__(self, pages, length: int) -> None:
        self.pages, self.length = np.asarray(pages, np.int32), length

    def decode(self) -> ChunkRows:
        one = np.zeros(1, np.int32)
        self.length += 1
        return ChunkRows.of(Chunk(one, one, self.pages[: -(-self.length // 32)], self.length - 1, ()), None)


def laid_out(layout: DecodeLayout, work: Pass, frame_of) -> dict[str, np.ndarray]:
    frames = frame_of[work.pages]
    laid = layout.lay(work, frames)
    laid.host["is_shared"] = np.array(layout.lay_groups(laid, work))
    layout.staging.upload(laid)
    arrays = {name: laid.host[name].copy() for name in laid.host.keys() - {"tokens", "positions", "entries"}}
    layout.expect(work, frames)
    assert all(np.array_equal(laid.host[name], values) for name, values in arrays.items()), "it is being copied yet"
    return arrays


def test_what_was_laid_out_ahead_is_what_is_laid_out_anew(device):
    rng = np.random.default_rng(5)
    frame_of = rng.permutation(NUM_PAGES).astype(np.int32)
    prefix = rng.permutation(NUM_PAGES)[:40]

    def file() -> File:
        pages = rng.permutation(NUM_PAGES)[:90]
        if rng.random() < 0.5:
            pages[:40] = prefix
        return File(pages, int(rng.integers(0, 2100)))

    ahead, files, has_shared = DecodeLayout(device), [file() for _ in range(6)], 0
    for _ in range(300):
        match rng.integers(0, 12):
            case 0 if len(files) < 9:
                files.insert(int(rng.integers(0, len(files))), file())
            case 1 if len(files) > 1:
                files.pop(int(rng.integers(0, len(files))))
            case 2:
                files[0] = file()
            case 3:
                files[-1].length -= int(rng.integers(0, min(40, files[-1].length)))
            case 4:
                rng.shuffle(files)
            case 5:  # pages went away and came back elsewhere
                some = rng.permutation(NUM_PAGES)[: NUM_PAGES // 4]
                frame_of[some] = np.roll(frame_of[some], 1)
        for each in files:
            each.length = min(each.length, 32 * 90 - 1)
        work = Pass([each.decode() for each in files])
        got, expected = laid_out(ahead, work, frame_of), laid_out(DecodeLayout(device), work, frame_of)
        for name, values in expected.items():
            assert np.array_equal(got[name], values), name
        has_shared += bool(expected["is_shared"])
    assert has_shared > 50


def test_decodes_that_follow_each_other_leave_new_pages_alone_to_be_laid_out(device):
    frame_of = np.random.default_rng(5).permutation(NUM_PAGES)
    files = [File(np.arange(20 * row, 20 * row + 20), 100 + row) for row in range(64)]
    layout = DecodeLayout(device)
    laid_out(layout, Pass([file.decode() for file in files]), frame_of)
    layout.num_late = 0
    before = sum(-(-file.length // 32) for file in files)
    for _ in range(70):
        laid_out(layout, Pass([file.decode() for file in files]), frame_of)
    assert layout.num_late == sum(-(-file.length // 32) for file in files) - before > 64


def test_tables_that_a_pass_has_no_room_for_are_not_laid_out_ahead(device):
    most = MAX_SPLITS * SPLIT_PAGES
    layout, frame_of = DecodeLayout(device), np.arange(most, dtype=np.int32)
    file = File(np.arange(most), most * 32 - 1)
    address = layout.staging.lay({"any": (1,)}).device["any"].data_ptr()
    laid_out(layout, Pass([file.decode()]), frame_of)
    assert layout.staging.lay({"any": (1,)}).device["any"].data_ptr() == address
