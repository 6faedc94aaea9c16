"""Decode loops go on in C from step to step: nobody can tell but by the time that it takes."""

import json
import re
import signal
import textwrap

import pytest

LOOP = """
def loop(kv, tokens, count, **options):
    rows = []
    for _ in range(count):
        dist = sym.pred(kv, tokens, **options)
        rows.append(bytes(dist.logits))
        tokens = [dist.argmax()]
    return tokens, rows
"""


def with_loop(source):
    return LOOP + textwrap.dedent(source)


@pytest.mark.slow
def test_a_loop_gives_the_bits_and_the_file_of_calls_that_are_scheduled_one_by_one(daemon):
    out = daemon.run(
        with_loop("""
        hot, cold = sym.kv_create(), sym.kv_create()
        _, fast = loop(hot, [5, 6, 7], 150)
        _, slow = loop(cold, [5, 6, 7], 150, priority=1)  # a priority is the scheduler's affair
        assert fast == slow, [i for i, (a, b) in enumerate(zip(fast, slow)) if a != b][:5]
        assert hot.read() == cold.read()
        print(hot.len())
        """)
    )
    assert out == "152\n"


def test_after_every_answer_the_file_has_grown_for_everybody(daemon):
    out = daemon.run(
        """
        kv = sym.kv_create("grows.kv")
        path = os.path.join(sym.model_info().mount, "grows.kv")
        tokens = [5]
        for count in range(1, 100):
            tokens = [sym.pred(kv, tokens).argmax()]
            assert kv.len() == count
            assert sym.kv_stat("grows.kv").tokens == count
            assert os.getxattr(path, "user.kv.tokens") == str(count).encode()
        kv.remove()
        """
    )
    assert out == ""


@pytest.mark.slow
def test_threads_and_programs_decode_side_by_side_and_each_gets_its_own(daemon):
    source = with_loop("""
        start = int(sys.argv[1])
        results = {}
        def work(seed):
            with sym.kv_create() as kv:
                results[seed] = loop(kv, [seed, seed + 1], 40 + seed % 7)[1]
        threads = [threading.Thread(target=work, args=(start + i,)) for i in range(6)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        for seed, rows in results.items():
            with sym.kv_create() as kv:
                assert loop(kv, [seed, seed + 1], 40 + seed % 7, priority=1)[1] == rows
        print(len(results))
        """)
    programs = [daemon.program(source, str(start)) for start in (10, 50, 90)]
    for program in programs:
        out, err = program.communicate(timeout=100)
        assert (program.returncode, out) == (0, "6\n"), err


def test_other_calls_of_a_program_are_answered_while_it_decodes(daemon):
    out = daemon.run(
        """
        kv, stop, answered = sym.kv_create(), [], []
        def ask():
            while not stop:
                assert sym.model_info().vocab_size
                with sym.kv_create() as other:
                    sym.pred(other, [1, 2, 3])
                answered.append(sym.tokenize("abc"))
        thread = threading.Thread(target=ask)
        thread.start()
        tokens = [5]
        for _ in range(300):
            tokens = [sym.pred(kv, tokens).argmax()]
        stop.append(1)
        thread.join()
        assert kv.len() == 300 and len(answered) > 3, len(answered)
        """
    )
    assert out == ""


def test_a_loop_can_fork_cut_and_position_its_file_in_the_middle(daemon):
    out = daemon.run(
        with_loop("""
        kv = sym.kv_create()
        forks, lengths = [], []
        tokens, position = [5], 0
        for i in range(120):
            dist = sym.pred(kv, tokens, position)
            position += 1
            tokens = [dist.argmax()]
            if i % 17 == 0:
                forks.append(kv.fork())
                lengths.append(position)
            if i % 29 == 28:
                kv.truncate(position - 3)
                position -= 3
        assert [fork.len() for fork in forks] == lengths
        assert kv.len() == position and kv.read()[1] == list(range(position))
        for fork in forks:
            tail = fork.read()[0]
            with sym.kv_create() as again:
                sym.kv_write(again, tail)
                assert bytes(sym.pred(again, [9]).logits) == bytes(sym.pred(fork, [9]).logits)
        """)
    )
    assert out == ""


@pytest.mark.slow
def test_a_full_pool_is_told_at_the_same_entry_and_takes_nothing(start_daemon):
    daemon = start_daemon("--model", "tiny", "--kv-memory", "128K", "--policy", "none")
    out = daemon.run(
        """
        lengths = []
        for options in ({}, {"priority": 1}):
            with sym.kv_create() as kv:
                try:
                    while True:
                        sym.pred(kv, [7], 0, **options)
                except sym.NoSpace:
                    lengths.append(kv.len())
        assert lengths[0] == lengths[1], lengths
        assert lengths[0] % 32 == 0
        check = sym.daemon_check()
        print(lengths[0] // 32 == sym.daemon_stat()["num_pages"])
        """
    )
    assert out == "True\n"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_programs_that_die_in_the_middle_of_a_loop_cost_nobody_anything(daemon, number):
    endless = """
        kv, tokens = sym.kv_create(), [5]
        position = 0
        for count in range(10**9):
            tokens = [sym.pred(kv, tokens, count % 1000).argmax()]
            if count == 50:
                print("going", flush=True)
            if count % 300 == 299:
                kv.truncate(0)
        """
    others = [daemon.program(endless) for _ in range(3)]
    for other in others:
        assert other.stdout.readline() == "going\n"
    for other in others:
        other.send_signal(number)
        other.communicate(timeout=30)
    out = daemon.run(
        """
        while sym.daemon_stat()["lips"] > 1:
            sym.tokenize("somebody is still being seen off")
        with sym.kv_create() as kv:
            tokens = [5]
            for _ in range(50):
                tokens = [sym.pred(kv, tokens).argmax()]
        print(sym.daemon_check()["num_files"] >= 0)
        """
    )
    assert out == "True\n"


def test_steps_of_loops_are_counted_like_any(daemon):
    before = daemon.stat()
    daemon.run("""
        kv, tokens = sym.kv_create(), [5]
        for _ in range(100):
            tokens = [sym.pred(kv, tokens).argmax()]
        """)
    after = daemon.stat()
    assert after["num_tokens"] - before["num_tokens"] == 100
    assert after["num_calls"] - before["num_calls"] == 100
    assert 100 <= after["num_steps"] - before["num_steps"] <= 101
    assert json.dumps(after)


def test_a_connection_may_end_in_the_middle_of_a_step(daemon):
    out = daemon.run(
        """
        def work(grown):
            kv, tokens = sym.kv_create(), [5]
            try:
                while True:
                    tokens = [sym.pred(kv, tokens).argmax()]
                    grown.release()
            except sym.SymError:
                pass
        for _ in range(20):
            grown = threading.Semaphore(0)
            threads = [threading.Thread(target=work, args=(grown,)) for _ in range(2)]
            for thread in threads: thread.start()
            for _ in range(9): grown.acquire()
            sym.close()
            for thread in threads: thread.join()
        print(sym.model_info().page_entries)
        """
    )
    assert out == "32\n"


def test_calls_that_a_run_takes_are_counted_like_those_of_the_gate(daemon):
    before = taken_calls(daemon)
    daemon.run(
        """
        kv, tokens = sym.kv_create(), [5]
        for _ in range(100):
            tokens = [sym.pred(kv, tokens).argmax()]
        """
    )
    assert taken_calls(daemon) - before == 100


def taken_calls(daemon):
    text = (daemon.mount / ".symphony/metrics").read_text()
    return int(dict(re.findall(r'^symphony_system_calls_total\{op="(\w+)"\} (\d+)', text, re.MULTILINE)).get("pred", 0))
