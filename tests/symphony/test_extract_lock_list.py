"""Files that are made of others, locked and read whole, on a real daemon and beside the mount."""

import os
import shutil

import numpy as np
import pytest

import libsym as sym

pytestmark = pytest.mark.usefixtures("shared")


def written(*tokens, path=None):
    kv = sym.kv_create(path)
    sym.kv_write(kv, tokens)
    return kv


def logits(kv, token):
    with sym.kv_fork(kv) as fork:
        return np.array(sym.pred(fork, [token]).logits)


def test_rebased_entries_begin_at_zero_and_others_keep_their_positions():
    base = written(*range(1, 81))
    ranges = [slice(70, None), (3, 40), range(3, 5), 7, np.int64(9), -1]
    expected = [*range(71, 81), *range(4, 41), 4, 5, 8, 10, 80]
    moved, kept = base.extract(ranges), base.extract(ranges, rebase=False)
    assert sym.kv_read(moved) == (expected, list(range(52)))
    assert sym.kv_read(kept) == (expected, [each - 1 for each in expected])
    assert np.abs(logits(moved, 7) - logits(kept, 7)).max() > 0
    with pytest.raises(sym.Invalid):
        base.extract([100])


def test_a_moved_context_answers_as_one_that_was_computed_there():
    text = [each % 250 for each in range(3, 3 + 7 * 90, 7)]
    far, near = sym.kv_create(), written(*text)
    sym.kv_write(far, text, 2000)
    got, expected = logits(sym.kv_extract(far, [(None, None)]), 5), logits(near, 5)
    assert np.abs(got - expected).max() < 0.03 * np.abs(expected).max()
    assert sym.kv_read(sym.kv_extract(far, [(None, None)], rebase=False))[1][0] == 2000


@pytest.mark.slow
def test_a_directory_that_fills_several_messages_is_listed_and_summed_up_whole(shared):
    """Two bytes of a name are six in JSON; a message holds a MiB."""
    directory = shared.mount / "many"
    directory.mkdir()
    base = written(*[1] * 40)
    names = [f"{index:04}" + "ü" * 120 for index in range(1500)]
    for name in names:
        base.fork(f"many/{name}").close()
    base.close()
    os.mknod(os.fsencode(directory) + b"/\xff\n")
    listed, summed = sym.kv_list("many"), sym.kv_du("many")
    assert [(entry.name, entry.kind) for entry in listed] == [*((name, "kv") for name in names), ("\udcff\n", "file")]
    assert (len(summed["rows"]), summed["total"]["pages"], summed["total"]["exclusive_pages"]) == (1501, 2, 2)
    assert summed["denied"] == []
    shutil.rmtree(directory)
    with pytest.raises(sym.NotFound):
        sym.kv_list("many")
