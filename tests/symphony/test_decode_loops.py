"""Decode loops go on in C from step to step: nobody can tell but by the time that it takes."""

import os
import re
import threading

import pytest

import libsym as sym


def loop(kv, tokens, count, **options):
    rows = []
    for _ in range(count):
        dist = sym.pred(kv, tokens, **options)
        rows.append(bytes(dist.logits))
        tokens = [dist.argmax()]
    return rows


def fast_and_slow(seed, count):
    hot, cold = sym.kv_create(), sym.kv_create()
    fast = loop(hot, [seed, seed + 1, 7], count)
    slow = loop(cold, [seed, seed + 1, 7], count, priority=1)  # a priority is the scheduler's affair
    return fast == slow, hot.read() == cold.read()


@pytest.mark.slow
def test_threads_and_programs_decode_side_by_side_and_each_gets_the_bits_of_calls_that_are_scheduled(shared):
    others = [shared.program(f"tokens, kv = [{start}], sym.kv_create()\n{LOOP}") for start in (50, 90)]
    found = []
    threads = [threading.Thread(target=lambda i=i: found.append(fast_and_slow(i, 60 + i % 7))) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [(True, True)] * 6
    for start, other in zip((50, 90), others, strict=True):
        out, err = other.communicate(timeout=100)
        tokens, kv = [start], sym.kv_create()
        for _ in range(100):
            tokens = [sym.pred(kv, tokens, priority=1).argmax()]
        assert out == f"{kv.read()[0]}\n", err


LOOP = """
for _ in range(100):
    tokens = [sym.pred(kv, tokens).argmax()]
print(kv.read()[0])
"""


def test_after_every_answer_the_file_has_grown_for_everybody_and_the_call_was_counted(shared):
    def counted():
        text = (shared.mount / ".symphony/metrics").read_text()
        calls = dict(re.findall(r'^symphony_system_calls_total\{op="(\w+)"\} (\d+)', text, re.MULTILINE))
        return {"taken": int(calls.get("pred", 0)), **{name: stat()[name] for name in ("num_tokens", "num_calls")}}

    stat, kv, tokens = sym.daemon_stat, sym.kv_create("grows.kv"), [5]
    before, steps = counted(), stat()["num_steps"]
    for count in range(1, 101):
        tokens = [sym.pred(kv, tokens).argmax()]
        assert kv.len() == sym.kv_stat("grows.kv").tokens == count
        assert os.getxattr(shared.mount / "grows.kv", "user.kv.tokens") == b"%d" % count
    assert {name: number - before[name] for name, number in counted().items()} == dict.fromkeys(before, 100)
    assert 100 <= stat()["num_steps"] - steps <= 101


@pytest.mark.usefixtures("shared")
def test_a_loop_can_fork_cut_and_position_its_file_in_the_middle():
    kv, forks, tokens, position = sym.kv_create(), [], [5], 0
    for step in range(120):
        tokens = [sym.pred(kv, tokens, position).argmax()]
        position += 1
        if step % 17 == 0:
            forks.append((kv.fork(), position))
        if step % 29 == 28:
            position -= 3
            kv.truncate(position)
    assert [fork.len() for fork, _ in forks] == [length for _, length in forks]
    assert kv.read()[1] == list(range(position))
    for fork, _ in forks:
        again = sym.kv_create()
        sym.kv_write(again, fork.read()[0])
        assert bytes(sym.pred(again, [9]).logits) == bytes(sym.pred(fork, [9]).logits)


@pytest.mark.slow
def test_a_full_pool_is_told_at_the_same_entry_and_takes_nothing(start_daemon):
    sym.connect(start_daemon("--model", "tiny", "--kv-memory", "128K", "--policy", "none").socket)
    lengths = []
    for priority in (None, 1):
        with sym.kv_create() as kv:
            with pytest.raises(sym.NoSpace):  # noqa: PT012 - in whichever call
                while True:
                    sym.pred(kv, [7], 0, priority=priority)
            lengths.append(kv.len())
    assert lengths == [32 * sym.daemon_stat()["num_pages"]] * 2
    sym.daemon_check()
    sym.close()


@pytest.mark.usefixtures("shared")
def test_a_connection_may_end_in_the_middle_of_a_step():
    def work(kv, grown):
        tokens = [5]
        with pytest.raises(sym.SymError):  # noqa: PT012 - in whichever call
            while True:
                tokens = [sym.pred(kv, tokens).argmax()]
                grown.release()

    for _ in range(20):
        grown = threading.Semaphore(0)
        threads = [threading.Thread(target=work, args=(sym.kv_create(), grown)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(9):
            grown.acquire()
        sym.close()
        for thread in threads:
            thread.join()
        assert sym.model_info().page_entries == 32


CROWD = """
kvs = [sym.kv_create() for _ in range(300)]
going = [sym.generate(kv, [5, 6], max_tokens=4000, stop_at_end=False, priority=100) for kv in kvs]
for generation in going:
    next(generation)
print("all of them decode", flush=True)
sys.stdin.readline()
"""


@pytest.mark.slow
def test_a_prefill_a_generation_and_a_text_are_answered_while_more_decode_than_a_step_has_seats(shared):
    """300 generations, 256 of which fit a step."""
    crowd = shared.program(CROWD)
    try:
        assert crowd.stdout.readline() == "all of them decode\n", crowd.stderr.read()
        with sym.kv_create() as kv:
            assert sym.pred(kv, [1, 2, 3], priority=-100).argmax() < 259
            assert len(list(sym.generate(kv, [4], max_tokens=3, stop_at_end=False, priority=100))) == 3
            assert sym.kv_write(kv, list(range(200))) == 206
        (shared.mount / ".symphony/text/crowded.kv").write_text("a text")
        assert (shared.mount / ".symphony/text/crowded.kv").read_text() == "a text"
        assert shared.stat()["waiting_calls"] >= 300, "all of the crowd go on"
    finally:
        crowd.kill()
        crowd.communicate()
