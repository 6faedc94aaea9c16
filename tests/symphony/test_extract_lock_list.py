"""Files that are made of others, locked and read whole, on a real daemon and beside the mount."""

import os
import shutil
import threading

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


def test_an_extract_of_a_prefix_is_that_prefix():
    tokens = list(range(1, 81))
    with written(*tokens) as base, sym.kv_extract(base, [(0, 50)]) as part, written(*tokens[:50]) as fresh:
        assert sym.kv_read(part) == (tokens[:50], list(range(50)))
        assert (logits(part, 7) == logits(fresh, 7)).all()
        assert sym.kv_stat(part).exclusive_pages == 0
        sym.kv_write(part, [9])
        assert len(base) == 80


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


def test_merged_files_are_joined_and_can_be_continued(shared):
    one, two = written(*range(1, 41), path="one.kv"), written(*range(50, 60))
    made = sym.kv_merge([one, two, one], "all.kv", mode=0o640)
    assert sym.kv_read(made) == ([*range(1, 41), *range(50, 60), *range(1, 41)], list(range(90)))
    assert sym.pred(made, [3]).argmax() >= 0
    assert (shared.mount / "all.kv").stat().st_mode & 0o777 == 0o640
    assert sym.kv_stat("all.kv").tokens == 91


def test_extracts_go_on_beside_appends_and_other_calls():
    """Four threads cut pieces out of a file that a fifth appends to; every piece is what it says."""
    base, wrong = written(*range(1, 101)), []

    def work(seed):
        for index in range(20):
            start = (seed * 13 + index * 7) % 90
            with base.extract([(start, start + 10), (0, 40)]) as piece:
                if sym.kv_read(piece) != ([*range(start + 1, start + 11), *range(1, 41)], list(range(50))):
                    wrong.append(start)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(60):
        sym.kv_write(base, [5, 6, 7])
    for thread in threads:
        thread.join()
    assert (wrong, len(base)) == ([], 280)


def test_a_program_waits_for_the_lock_of_another_while_both_go_on_otherwise(shared):
    """A killed program gives its lock back."""
    kv = written(1, path="l.kv")
    sym.kv_lock(kv)
    program = shared.program("""
        kv = sym.kv_open("l.kv")
        print("ready", flush=True)
        sym.kv_lock(kv)
        print("mine", flush=True)
        time.sleep(1000)
    """)
    assert program.stdout.readline() == "ready\n"
    assert sym.pred(kv, [2]).argmax() >= 0
    sym.kv_unlock(kv)
    assert program.stdout.readline() == "mine\n"
    with pytest.raises(sym.WouldBlock, match=rf"l\.kv is locked by pid {program.pid} \(python"):
        sym.kv_lock(kv, blocking=False)
    program.kill()
    program.communicate(timeout=30)
    with sym.kv_lock(kv):
        assert sym.daemon_check()["num_locked_files"] == 1


@pytest.mark.slow
def test_a_file_longer_than_a_message_is_read_whole():
    """A message holds 131,064 entries."""
    kv = written(*range(256))
    while len(kv) < 140_000:
        kv = sym.kv_merge([kv] * 16 if len(kv) < 5000 else [kv, kv], rebase=False)
    for numbers in sym.kv_read(kv):
        assert len(numbers) == len(kv)
        assert (np.array(numbers).reshape(-1, 256) == np.arange(256)).all()
    assert sym.kv_read(kv, 131_000, 131_200)[0] == [each % 256 for each in range(131_000, 131_200)]


@pytest.mark.slow
def test_a_directory_that_fills_several_messages_is_listed_whole(shared):
    """Two bytes of a name are six in JSON; a message holds a MiB."""
    directory = shared.mount / "many"
    directory.mkdir()
    names = [f"{index:04}" + "ü" * 120 for index in range(1500)]
    for name in names:
        os.mknod(directory / name)
    os.mknod(os.fsencode(directory) + b"/\xff\n")
    found = sym.kv_list("many")
    assert [entry.name for entry in found] == [*names, "\udcff\n"]
    assert {entry.kind for entry in found} == {"file"}
    shutil.rmtree(directory)
    with pytest.raises(sym.NotFound):
        sym.kv_list("many")
