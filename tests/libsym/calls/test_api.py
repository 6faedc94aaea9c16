"""The system calls by their names, as a LIP uses them."""

import copy
import errno
import gc
import pickle
import threading
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, cast

import anyio
import numpy as np
import pytest

import libsym as sym
from libsym.abi import MAX_FORKS
from tests.libsym.echo_client import VOCAB_SIZE, Daemon
from tests.libsym.echo_daemon import BEST_LOGIT, SHRINKS, THE_END
from tests.libsym.faces import is_true_in_a_child, run_threads
from tests.libsym.interrupts import ends_before

pytestmark = pytest.mark.usefixtures("connected")


def slots_held() -> int:
    return int(sym.daemon_stat()["held_slots"])


def test_the_papers_plain_loop_runs_as_written(capsys: pytest.CaptureFixture[str]) -> None:
    kv = sym.kv_create()
    tokens = sym.tokenize("tick")
    for _ in range(3):
        dist = sym.pred(kv, tokens)
        tokens = [dist.argmax()]
        sym.send_to_user(sym.detokenize(tokens))
    sym.kv_remove(kv)
    assert capsys.readouterr().out == "kkk"
    assert sym.daemon_stat()["open"] == []


def test_a_daemon_that_knows_no_attention_is_said_to_be_older() -> None:
    kv = sym.kv_create()

    async def in_a_loop() -> None:
        await sym.aio.pred(kv, [1], attention="entries")

    with pytest.raises(sym.Invalid, match="older than the library"):
        sym.pred(kv, [1], attention="entries")
    with pytest.raises(sym.Invalid, match="older than the library"):
        sym.pred(kv, [1], attention="pages", top_k=3)
    with pytest.raises(sym.Invalid, match="older than the library"):
        anyio.run(in_a_loop)
    with pytest.raises(sym.BatchFailed, match="older than the library") as failed:
        sym.pred_batch([sym.Pred(kv, [1]), sym.Pred(kv, [2], attention="pages")])
    assert isinstance(failed.value.results[1], sym.Invalid)
    assert len(kv) == 1


def test_slots_are_held_by_the_last_view_alone() -> None:
    kv = sym.kv_create()
    dist = sym.pred(kv, [1, 2, 3], rows="all")
    assert slots_held() == 3
    row = dist[1]
    del dist
    assert slots_held() == 3
    array = np.asarray(row.logits)
    part = array[1:3]
    del row, array
    assert slots_held() == 3
    assert part.tolist() == [0.0, BEST_LOGIT]
    del part
    assert slots_held() == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    [
        lambda kvs: sym.pred(kvs[0], [1]),
        lambda kvs: sym.pred(kvs[0], [1, 2], rows="all")[0].logits,
        lambda kvs: sym.pred_batch([sym.Pred(kv, [1, 2], rows="all") for kv in kvs]),
        lambda kvs: sym.kv_create(),
        lambda kvs: sym.kv_fork(kvs[0]),
    ],
    ids=["pred", "rows", "batch", "create", "fork"],
)
def test_a_call_that_is_interrupted_at_any_moment_leaves_nothing_behind(call: Callable[[list[sym.KV]], object]) -> None:
    kvs = [sym.kv_create() for _ in range(3)]
    moment = 1
    while not ends_before(moment, lambda: call(kvs)):
        moment += 1
        sym.daemon_stat()  # what was put off goes with it
        stat = sym.daemon_stat()
        assert (stat["held_slots"], stat["open"]) == (0, sorted(kv.handle for kv in kvs)), f"at moment {moment}"
    assert moment > 20


def test_too_many_live_dists_are_no_buffers_and_dropping_one_helps() -> None:
    kv = sym.kv_create()
    held = [sym.pred(kv, [1]) for _ in range(1024)]
    with pytest.raises(sym.NoBuffers, match="drop some Dists"):
        sym.pred(kv, [1])
    held.pop().close()
    assert sym.pred(kv, [2]).argmax() == 2
    with pytest.raises(sym.TooLarge, match="1025 rows"):
        sym.pred(kv, [1] * 1025, rows="all")


def test_after_the_daemons_death_only_connect_goes_on_and_rows_stay_readable(start_daemon, connected):
    doomed = start_daemon()
    sym.connect(doomed.path)
    kv = sym.kv_create()
    dist = sym.pred(kv, [42])
    doomed.kill()
    with pytest.raises(sym.NotConnected, match="symphony serve"):
        sym.pred(kv, [1])
    with pytest.raises(sym.NotConnected, match=r"sym\.connect"):
        sym.model_info()
    sym.connect(connected.path)
    assert sym.model_info().name == "echo"
    with pytest.raises(sym.NotConnected):
        sym.pred(kv, [1])
    assert dist.argmax() == 42
    sym.close()
    assert dist.argmax() == 42


def test_a_socket_path_that_cannot_be_one_is_invalid(tmp_path: Path) -> None:
    sym.close()
    with pytest.raises(sym.Invalid, match="cannot be a daemon's socket"):
        sym.connect(tmp_path / ("x" * 200))


def test_connect_keeps_a_live_connection(connected: Daemon) -> None:
    kv = sym.kv_create()
    sym.connect()
    sym.connect(connected.path)
    assert sym.pred(kv, [3]).argmax() == 3
    assert sym.daemon_stat()["open"] == [kv.handle]


@pytest.mark.slow
@pytest.mark.parametrize("make", [sym.kv_create, lambda: sym.kv_extract(sym.kv_create(), [(0, 0)])])
def test_dropped_files_are_closed_with_the_next_call(make: Callable[[], sym.KV]) -> None:
    kept, dropped = sym.kv_create(), make()
    number = dropped.handle
    del dropped
    gc.collect()
    sym.model_info()
    stat = sym.daemon_stat()
    assert number in stat["closed"]
    assert stat["open"] == [kept.handle]


def test_forks_at_once_are_as_many_files_whatever_a_call_may_make() -> None:
    kv = sym.kv_create()
    kv.write([1, 2, 3])
    forks = kv.fork_n(2 * MAX_FORKS + 3)
    handles = [fork.handle for fork in forks]
    assert handles == [kv.handle + number for number in range(1, 2 * MAX_FORKS + 4)]
    assert {fork.len() for fork in forks} == {3}
    for fork in forks:
        fork.close()
    assert sorted(sym.daemon_stat()["closed"]) == handles
    assert sym.kv_fork_n(kv, 0) == []


def test_a_closed_file_says_so_and_closing_twice_is_fine() -> None:
    with sym.kv_create("note.kv") as kv:
        sym.kv_write(kv, [1])
    kv.close()
    with pytest.raises(sym.BadHandle, match=r"note\.kv is closed"):
        sym.pred(kv, [1])


def test_files_read_write_truncate_fork() -> None:
    kv = sym.kv_create()
    assert sym.kv_write(kv, [4, 5, 6]) == 3
    assert sym.kv_read(kv) == ([4, 5, 6], [0, 1, 2])
    copy = sym.kv_fork(kv)
    sym.kv_truncate(kv, 1)
    assert (len(kv), copy.len()) == (1, 3)
    assert bool(sym.kv_create())
    assert sym.kv_stat(kv).kind == "kv"
    assert sym.kv_stat("by/path.kv").tokens == 0
    assert sym.kv_list() == [sym.KvEntry(name, "kv", 4096, 3) for name in ("a.kv", "b\udcff", "c.kv")]
    rows = [{"path": f"dir/{name}", "pages": 1} for name in ("a", "b\udcff", "c")]
    assert sym.kv_du("dir") == {"rows": rows, "total": {"path": "dir", "pages": 3}, "denied": ["dir/z"]}
    models = [{"path": "tiny bf16", "pages": 3}]
    assert sym.kv_du("dir", by_model=True) == sym.kv_du("dir") | {"rows": models}


def test_a_long_file_is_read_in_as_many_messages_as_it_takes() -> None:
    kv = sym.kv_create()
    tokens = list(range(35))
    sym.kv_write(kv, tokens)
    assert sym.kv_read(kv) == (tokens, tokens)
    for window in ((5,), (5, 30), (12, 13), (-3,), (0, -30), (-100, 4), (20, 10), (35,), (99, 200), (0, 0)):
        start, stop = (*window, None)[:2]
        assert sym.kv_read(kv, *window) == (tokens[start:stop], tokens[start:stop]), window


def test_a_file_that_is_cut_while_it_is_read_is_read_again() -> None:
    kv = sym.kv_create()
    sym.kv_write(kv, [*range(25), SHRINKS])
    assert sym.kv_read(kv) == (list(range(25)), list(range(25)))


def told(kv: sym.KV) -> list[int]:
    """Return what the echo daemon was told of an extract or a merge."""
    return sym.kv_read(kv)[0]


def test_ranges_go_out_as_pairs_whatever_they_came_as() -> None:
    kv = sym.kv_create()
    ranges: list[Any] = [(0, 5), slice(2, 3), range(7), slice(None, -1), (None, None), np.array([4, 6])]
    made = sym.kv_extract(kv, ranges, "a")
    assert told(made) == [0o600, 1, 0, 5, 2, 3, 0, 7, 0, -1, 0, THE_END, 4, 6, ord("a")]
    assert (made.path, made.writable) == ("a", True)
    assert told(kv.extract([], rebase=False, mode=0o644)) == [0o644, 0]


def test_merged_files_go_out_as_their_handles() -> None:
    first, second = sym.kv_create(), sym.kv_create()
    handles = [first.handle, second.handle, first.handle]
    assert told(sym.kv_merge([first, second, first], "m")) == [0o600, 1, *handles, ord("m")]
    assert told(sym.kv_merge(iter([second]), rebase=False, mode=0o640)) == [0o640, 0, second.handle]
    assert told(sym.kv_merge([])) == [0o600, 1]


def test_files_of_an_earlier_connection_are_not_merged(connected: Daemon) -> None:
    old = sym.kv_create()
    sym.close()
    sym.connect(connected.path)
    with pytest.raises(sym.BadHandle, match="earlier connection"):
        sym.kv_merge([sym.kv_create(), old])


def test_a_lock_ends_with_its_block_or_with_unlock() -> None:
    kv = sym.kv_create()
    with sym.kv_lock(kv) as held:
        assert held is kv
        with pytest.raises(sym.WouldBlock) as caught:
            sym.kv_lock(kv, blocking=False)
        assert caught.value.errno == errno.EWOULDBLOCK
    assert not sym.daemon_stat()["locked"]
    kv.lock(shared=True)
    assert sym.daemon_stat()["locked"]
    sym.kv_unlock(kv)
    assert not sym.daemon_stat()["locked"]
    with kv.lock():
        kv.close()  # which gives the lock back, too


def test_what_the_daemon_adds_does_not_disturb_old_programs() -> None:
    info = sym.model_info()
    assert (info.name, info.vocab_size, info.eos_ids, info.bos_id) == ("echo", VOCAB_SIZE, frozenset({0, 2}), 1)
    assert info.special_ids == frozenset()  # of a daemon that does not say
    assert info.extra == {"colour": "red"}
    assert sym.daemon_check() == {"num_pages": 3, "num_free_pages": 3}


def test_wrong_arguments_are_refused_before_they_are_sent() -> None:
    kv, untyped = sym.kv_create(), cast("Any", sym)
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: untyped.pred(kv, "text"), "tokenize"),
        (lambda: untyped.pred(kv, b"abcd"), "tokenize"),
        (lambda: untyped.pred(kv, [1.5]), "whole numbers"),
        (lambda: untyped.pred(kv, 7), "whole numbers"),
        (lambda: untyped.pred(kv, [2**31]), "32 bits"),
        (lambda: untyped.pred(kv, [1, 2, 3], [5]), "3 tokens and 1 positions"),
        (lambda: untyped.pred(kv, [1], rows="some"), "rows='some'"),
        (lambda: untyped.kv_open("a.kv", "w"), "flags='w'"),
        (lambda: untyped.kv_open(""), "no path"),
        (lambda: untyped.kv_open("a\0b"), "no path"),
        (lambda: untyped.kv_truncate(kv, -1), "-1"),
        (lambda: untyped.kv_extract(kv, (0, 10)), r"\(0, 10\) may be a range, or two entries"),
        (lambda: untyped.kv_extract(kv, slice(3)), "give a list"),
        (lambda: untyped.kv_extract(kv, [(0, 1, 2)]), "no range"),
        (lambda: untyped.kv_extract(kv, [slice(0, 9, 2)]), "skips entries"),
        (lambda: untyped.kv_extract(kv, [(0.5, 1)]), "start=0.5"),
        (lambda: untyped.kv_extract(kv, [(0, 1 << 70)]), f"stop={1 << 70}"),
        (lambda: untyped.kv_extract(kv, ["ab"]), "start='a'"),
        (lambda: untyped.kv_merge([5]), "a path must be text, not 5"),
        (lambda: untyped.kv_merge(kv), "a list of open files"),
        (lambda: untyped.tokenize("\ud800"), "surrogate"),
        (lambda: untyped.chat_template([{"role": object()}]), "JSON"),
        (lambda: untyped.chat_tokens([{"role": object()}]), "JSON"),
        (lambda: untyped.kv_mkdir("a\0b"), "no path"),
        (lambda: untyped.kv_open_or_compute("a.kv", [1], "w"), "flags='w'"),
        (lambda: untyped.send_to_user(object()), "JSON"),
        (lambda: kv.fork_n(-1), "0 or more"),
        (lambda: copy.copy(kv), "fork"),
        (lambda: pickle.dumps(kv), "fork"),
        *((lambda wrong=wrong: untyped.kv_create(mode=wrong), "whole number") for wrong in (2**63, 2**70, 1.5, "600")),
    ]
    for call, words in refused:
        with pytest.raises(sym.Invalid, match=words) as caught:
            call()
        assert "\n" not in str(caught.value)
    assert len(kv) == 0


@pytest.mark.parametrize("huge", [10**400, -(10**400), 10**5000, Fraction(10**400)], ids=["e400", "-", "e5000", "/1"])
def test_numbers_beyond_every_float_are_refused(huge: Any) -> None:
    """10**5000 has more digits than Python writes: the message must not fail."""
    kv, row = sym.kv_create(), sym.Dist.of([1.0, 2.0])
    refused: list[Callable[[], object]] = [
        *(
            partial(sym.pred, kv, [1], **{name: huge})
            for name in ("deadline", "priority", "rows", "top_k", "first_draw")
        ),
        *(partial(sym.generate, kv, [1], **{name: huge}) for name in ("deadline", "max_tokens", "stop", "logprobs")),
        *(partial(sym.Sampler, **{name: huge}) for name in ("temperature", "top_p", "presence_penalty")),
        *(partial(sym.Budget, **{name: huge}) for name in ("seconds", "tokens")),
        *(partial(sym.Interpreter, **{name: huge}) for name in ("seconds", "memory")),
        lambda: sym.Sampler(logit_bias={1: huge}),
        lambda: row.sample(min_p=huge),
        lambda: sym.Dist.of([1.0, huge]),
        lambda: sym.PIN(huge),
        lambda: sym.TTL(huge),
        lambda: sym.recv(timeout=huge),
        lambda: sym.kill("1f2e3d4c", huge),
        lambda: sym.kv_truncate(kv, huge),
        lambda: sym.kv_create(mode=huge),
    ]
    for number, call in enumerate(refused):
        with pytest.raises(sym.Invalid) as caught:
            call()
        assert len(str(caught.value)) < 600, number


def test_numpy_tokens_and_positions_are_taken() -> None:
    kv, untyped = sym.kv_create(), cast("Any", sym)
    assert untyped.pred(kv, np.array([1, 9]), np.array([0, 1])).argmax() == 9
    assert untyped.pred(kv, np.array([3], np.int64), 7).argmax() == 3


def test_text_bytes_and_objects_go_to_the_user(capfd: pytest.CaptureFixture[str]) -> None:
    sym.send_to_user("grüße ")
    sym.send_to_user(b"bytes\n")
    sym.send_to_user({"a": [1, "ü"]})
    assert capfd.readouterr().out == 'grüße bytes\n{"a": [1, "ü"]}\n'


@pytest.mark.slow
def test_a_child_that_forks_while_other_threads_call_still_works() -> None:
    """Locks that a vanished thread held in the parent must not matter in the child."""
    stop = threading.Event()

    def talk(number: int) -> None:
        try:
            while number and not stop.is_set():
                sym.tokenize("x")
            for _ in range(0 if number else 20):
                assert is_true_in_a_child(lambda: sym.tokenize("a") == [97])
                count.append(1)
        finally:
            if not number:
                stop.set()

    count: list[int] = []
    run_threads(talk, 4)
    assert len(count) == 20


def test_threads_that_call_first_share_one_connection() -> None:
    barrier = threading.Barrier(8)
    connections: list[int] = []

    def first_call(_number: int) -> None:
        barrier.wait()
        connections.append(int(sym.daemon_stat()["connections"]))

    before = int(sym.daemon_stat()["connections"])
    sym.close()
    run_threads(first_call, 8)
    assert connections == [before] * 8
