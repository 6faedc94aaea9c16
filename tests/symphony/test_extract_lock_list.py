"""The system calls that make files of others, lock, read and list them, on a real daemon and beside the mount."""

import errno
import os
import signal
import subprocess
import threading

import numpy as np
import pytest

import libsym as sym
from libsym.abi import REBASE, Op
from libsym.channel.process import process


@pytest.fixture
def connected(daemon, monkeypatch):
    monkeypatch.setenv("SYMPHONY_SOCKET", str(daemon.socket))
    sym.connect(str(daemon.socket))
    free = sym.daemon_stat()["num_free_pages"]
    yield daemon
    books = sym.daemon_check()
    assert books["num_free_pages"] == free, "the test leaks pages"
    assert books["num_free_pages"] + books["num_referenced_pages"] == books["num_pages"]
    assert books["num_locked_files"] == 0, "the test leaks a lock"
    sym.close()


def written(*tokens, path=None):
    kv = sym.kv_create(path)
    sym.kv_write(kv, tokens)
    return kv


def logits(kv, token):
    with sym.kv_fork(kv) as fork:
        return np.array(sym.pred(fork, [token]).logits)


# ---- extract and merge


@pytest.mark.slow
def test_an_extract_of_a_prefix_is_that_prefix(connected):
    tokens = list(range(1, 81))
    with written(*tokens) as base, sym.kv_extract(base, [(0, 50)]) as part, written(*tokens[:50]) as fresh:
        assert sym.kv_read(part) == (tokens[:50], list(range(50)))
        assert (logits(part, 7) == logits(fresh, 7)).all()
        assert sym.kv_stat(part).exclusive_pages == 0
        sym.kv_write(part, [9])
        assert len(base) == 80


def test_rebased_entries_begin_at_zero_and_others_keep_their_positions(connected):
    with written(*range(1, 81)) as base:
        ranges = [slice(70, None), (3, 40), range(3, 5)]
        expected = [*range(71, 81), *range(4, 41), 4, 5]
        with sym.kv_extract(base, ranges) as moved, sym.kv_extract(base, ranges, rebase=False) as kept:
            assert sym.kv_read(moved) == (expected, list(range(49)))
            assert sym.kv_read(kept) == (expected, [each - 1 for each in expected])
            assert np.abs(logits(moved, 7) - logits(kept, 7)).max() > 0


def test_a_moved_context_answers_as_one_that_was_computed_there(connected):
    text = [each % 250 for each in range(3, 3 + 7 * 90, 7)]
    with sym.kv_create() as far, written(*text) as near:
        sym.kv_write(far, text, 2000)
        with sym.kv_extract(far, [(None, None)]) as moved:
            got, expected = logits(moved, 5), logits(near, 5)
        assert np.abs(got - expected).max() < 0.03 * np.abs(expected).max()
        with sym.kv_extract(far, [(None, None)], rebase=False) as still_far:
            assert sym.kv_read(still_far)[1][0] == 2000


def test_merged_files_are_joined_and_can_be_continued(connected):
    with written(*range(1, 41), path="one.kv") as one, written(*range(50, 60)) as two:
        with sym.kv_merge([one, two, one], "all.kv", mode=0o640) as made:
            assert sym.kv_read(made) == ([*range(1, 41), *range(50, 60), *range(1, 41)], list(range(90)))
            assert sym.pred(made, [3]).argmax() >= 0
            assert len(made) == 91
        assert oct((connected.mount / "all.kv").stat().st_mode)[-3:] == "640"
        assert sym.kv_stat("all.kv").tokens == 91
    for name in ("one.kv", "all.kv"):
        sym.kv_remove(name)


def test_what_cannot_be_extracted_says_so_and_makes_nothing(connected):
    limit = sym.model_info().max_positions
    with written(*range(1, 11), path="ten.kv") as kv:
        for ranges, path, code in (
            ([(0, 11)], None, errno.EINVAL),
            ([(5, 4)], None, errno.EINVAL),
            ([(-11, None)], "new.kv", errno.EINVAL),
            ([(0, 1)], "ten.kv", errno.EEXIST),
            ([(0, 1)], "no/such.kv", errno.ENOENT),
            ([(0, 1)], "/etc/new.kv", errno.EXDEV),
            ([(0, 10)] * (limit // 10 + 1), "new.kv", errno.EINVAL),
        ):
            with pytest.raises(sym.SymError) as caught:
                sym.kv_extract(kv, ranges, path)
            assert caught.value.errno == code, caught.value
            assert "\n" not in str(caught.value)
        with pytest.raises(sym.NotFound):
            sym.kv_stat("new.kv")
        sym.kv_remove(kv)


def test_a_full_pool_refuses_a_merge_and_changes_nothing(connected):
    with sym.kv_create() as kv:
        sym.kv_write(kv, [1] * 4000)
        free = sym.daemon_stat()["num_free_pages"]
        with pytest.raises(sym.NoSpace):
            sym.kv_merge([kv] * 256, rebase=False)
        assert sym.daemon_stat()["num_free_pages"] == free


@pytest.mark.parametrize("op", [Op.KV_EXTRACT, Op.KV_MERGE])
@pytest.mark.parametrize(("rows", "payload"), [(1, b""), (-1, b""), (1 << 62, b"x" * 64), (2, b"\xff" * 16)])
def test_lies_about_the_payload_are_invalid_or_a_bad_handle(connected, op, rows, payload):
    with written(1, 2, 3) as kv, pytest.raises(sym.SymError) as caught:
        process.channel().call(op, flags=REBASE, handle=kv.handle, args=(0o600, rows, 0, 0), payload=payload)
    assert caught.value.errno in (errno.EINVAL, errno.EBADF)


def test_extracts_go_on_beside_appends_and_other_calls(connected):
    """Four threads cut pieces out of a file that a fifth appends to; every piece is what it says."""
    base, wrong = written(*range(1, 101)), []

    def work(seed):
        for index in range(20):
            start = (seed * 13 + index * 7) % 90
            with base.extract([(start, start + 10), (0, 40)]) as piece:
                expected = [*range(start + 1, start + 11), *range(1, 41)]
                if sym.kv_read(piece) != (expected, list(range(50))):
                    wrong.append(start)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(60):
        sym.kv_write(base, [5, 6, 7])
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(base) == 280
    base.close()


def test_a_program_that_is_killed_while_it_extracts_leaves_nothing(connected):
    free = sym.daemon_stat()["num_free_pages"]
    program = connected.program("""
        kv = sym.kv_create()
        sym.kv_write(kv, [1] * 4000)
        print("ready", flush=True)
        while True:
            sym.kv_extract(kv, [(1, None)]).close()
    """)
    assert program.stdout.readline() == "ready\n"
    program.send_signal(signal.SIGKILL)
    program.communicate(timeout=30)
    while sym.daemon_stat()["lips"] > 1:
        pass
    assert sym.daemon_stat()["num_free_pages"] == free


# ---- locks


@pytest.fixture
def locked(connected):
    """A file with a name, and a handle of ours that has its lock."""
    with written(1, path="l.kv") as kv:
        sym.kv_lock(kv)
        yield kv
        sym.kv_remove("l.kv")


def test_a_lock_excludes_other_handles_and_ends_with_its_own(locked):
    with sym.kv_open("l.kv") as other:
        for shared in (False, True):
            with pytest.raises(sym.WouldBlock, match=r"l\.kv is locked"):
                sym.kv_lock(other, shared=shared, blocking=False)
        sym.kv_unlock(locked)
        with sym.kv_lock(other, shared=True), sym.kv_lock(locked, shared=True):
            assert sym.daemon_check()["num_locked_files"] == 1
        sym.kv_lock(other)
    sym.kv_lock(locked, blocking=False)  # closing the other gave it back


WAITER = """
    kv = sym.kv_open("l.kv")
    print("ready", flush=True)
    with sym.kv_lock(kv):
        print("mine", flush=True)
"""


def wait_for_lips(count):
    while sym.daemon_stat()["lips"] != count:
        pass


def start_waiter(daemon):
    program = daemon.program(WAITER)
    assert program.stdout.readline() == "ready\n"
    return program


def test_a_program_waits_for_the_lock_of_another_while_both_go_on_otherwise(connected, locked):
    program = start_waiter(connected)
    assert sym.pred(locked, [2]).argmax() >= 0
    sym.kv_unlock(locked)
    out, err = program.communicate(timeout=30)
    assert out == "mine\n", err


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_program_that_ends_while_it_waits_leaves_the_queue(connected, locked, number):
    doomed = start_waiter(connected)
    doomed.send_signal(number)
    doomed.communicate(timeout=30)
    wait_for_lips(1)
    heir = start_waiter(connected)
    sym.kv_unlock(locked)
    assert heir.communicate(timeout=30)[0] == "mine\n"


def test_a_program_that_is_killed_gives_its_lock_back(connected):
    holder = connected.program("""
        kv = sym.kv_create("l.kv")
        sym.kv_lock(kv)
        print("mine", flush=True)
        time.sleep(1000)
    """)
    assert holder.stdout.readline() == "mine\n"
    with sym.kv_open("l.kv") as kv:
        with pytest.raises(sym.WouldBlock):
            sym.kv_lock(kv, blocking=False)
        holder.kill()
        holder.communicate(timeout=30)
        with sym.kv_lock(kv):
            sym.kv_remove("l.kv")


def test_other_threads_of_a_program_go_on_while_one_waits(connected, locked):
    """Closing the file that the thread waits with ends the wait."""
    errors, other = [], sym.kv_open("l.kv")
    handle, waiting = other.handle, threading.Event()

    def wait():
        waiting.set()
        try:
            process.channel().call(Op.KV_LOCK, handle=handle)
        except sym.SymError as error:
            errors.append(error.errno)

    thread = threading.Thread(target=wait)
    thread.start()
    waiting.wait()
    for token in range(20):
        sym.pred(locked, [token])
    other.close()
    thread.join(30)
    assert not thread.is_alive()
    assert errors in ([errno.EINTR], [errno.EBADF])  # EBADF: it had not even begun to wait


def test_unlock_ends_the_wait_of_another_thread_with_the_same_file(connected, locked):
    other, errors = sym.kv_open("l.kv"), []

    def wait():
        try:
            sym.kv_lock(other)
        except sym.SymError as error:
            errors.append(error.errno)

    thread = threading.Thread(target=wait)
    thread.start()
    while thread.is_alive():  # the first may come before it waits
        sym.kv_unlock(other)
    assert errors == [errno.EINTR]
    other.close()


# ---- windows


@pytest.mark.slow
def test_a_file_longer_than_a_message_is_read_whole(start_daemon):
    """A message holds 131,064 entries."""
    daemon = start_daemon("--model", "tiny:positions=400,layers=1", "--kv-memory", "64M")
    sym.connect(str(daemon.socket))
    with written(*range(256)) as block:
        kv = block.fork()
        while len(kv) < 140_000:
            kv = sym.kv_merge([kv] * 16 if len(kv) < 5000 else [kv, kv], rebase=False)
        tokens, positions = sym.kv_read(kv)
        assert (len(tokens), len(positions)) == (len(kv), len(kv))
        assert (np.array(tokens).reshape(-1, 256) == np.arange(256)).all()
        assert (np.array(positions).reshape(-1, 256) == np.arange(256)).all()
        assert sym.kv_read(kv, 131_000, 131_200)[0] == [each % 256 for each in range(131_000, 131_200)]
        kv.close()
    sym.daemon_check()
    sym.close()
    assert daemon.stop() == 0


@pytest.mark.slow
def test_a_directory_that_fills_several_messages_is_listed_whole(connected):
    """Two bytes of a name are six in JSON; a message holds a MiB."""
    directory = connected.mount / "many"
    directory.mkdir()
    names = [f"{index:04}" + "ü" * 120 for index in range(1500)]
    for name in names:
        os.mknod(directory / name)
    os.mknod(os.fsencode(directory) + b"/\xff\n")
    found = sym.kv_list("many")
    assert [entry.name for entry in found] == [*names, "\udcff\n"]
    assert {entry.kind for entry in found} == {"file"}
    subprocess.run(["rm", "-r", directory], check=True)
    with pytest.raises(sym.NotFound):
        sym.kv_list("many")


# ---- the books


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED as another user: only root can become one")
def test_the_books_are_for_root_and_the_daemons_own_user(connected):
    for directory in (connected.socket.parent, *connected.socket.parent.parents[:2]):
        directory.chmod(0o755)
    sym.close()
    os.seteuid(65534)
    try:
        with pytest.raises(sym.NotPermitted, match="uid 65534"):
            sym.daemon_check()
    finally:
        sym.close()
        os.seteuid(0)
    with written(1, 2, 3):
        books = sym.daemon_check()
        assert (books["num_references"], books["num_referenced_pages"], books["num_versions"]) == (1, 1, 1)


def test_du_counts_a_page_once_that_a_file_has_twice(connected, tmp_path):
    """Equal tokens at equal positions make equal pages; an image that is imported again has them as one page."""
    with written(*[1] * 32) as kv:
        sym.kv_merge([kv, kv], "twice.kv", rebase=False).close()
    (tmp_path / "image").write_bytes((connected.mount / "twice.kv").read_bytes())
    (connected.mount / "again.kv").write_bytes((tmp_path / "image").read_bytes())
    total = sym.kv_du()["total"]
    assert (total["exclusive_pages"], total["shared_pages"]) == (2, 0)
    for name in ("twice.kv", "again.kv"):
        sym.kv_remove(name)
