"""Decode loops go on in C from step to step: nobody can tell but by the time that it takes."""

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


LOOP = """
for _ in range(100):
    tokens = [sym.pred(kv, tokens).argmax()]
print(kv.read()[0])
"""
