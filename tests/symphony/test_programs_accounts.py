"""Usage of programs on a real daemon: counted to the program, however it connects, and never lost or counted twice."""

import os
import re
import subprocess
import sys
from typing import Any

import pytest

import libsym as sym
from scheduler.doors.launchers import PROTOCOL
from symphony.launcher.supervising import daemon_link
from tests.symphony.fake_launcher import FakeLauncher, Refused
from tests.symphony.launchers import eventually

PROMPT = list(b"the quick brown fox the quick brown fox the quick")


@pytest.fixture
def launch(tmp_path):
    """Launchers for a daemon; all go with the test."""
    launchers = list[FakeLauncher]()

    def launch(daemon):
        (directory := tmp_path / f"launcher-{len(launchers)}").mkdir()
        launchers.append(FakeLauncher(daemon.socket, directory))
        return launchers[-1]

    yield launch
    for each in launchers:
        each.close()


@pytest.fixture
def launcher(shared, launch):
    return launch(shared)


@pytest.fixture
def reach(monkeypatch):
    """Has this process connect to a daemon, from its next call on."""

    def reach(daemon):
        sym.close()
        monkeypatch.setenv("SYMPHONY_SOCKET", str(daemon.socket))
        return daemon

    yield reach
    sym.close()


@pytest.fixture
def reached(shared, reach):
    return reach(shared)


@pytest.fixture
def limited(reached, launcher):
    """Has this process be a program with limits; its number."""

    def limited(**limits):
        sym.connect(launcher.socket_of(number := launcher.start("greedy", limits=limits)))
        return number

    return limited


def tokens_of_programs():
    return sum(each.usage.tokens for each in sym.programs(ended=True))


def program(number):
    (found,) = [each for each in sym.programs(ended=True) if each.id == number]
    return found


def use_the_model(kv):
    """Append by every call that can, as far as one program goes."""
    tokens = PROMPT
    for _ in range(20):
        tokens = [sym.pred(kv, tokens).argmax()]
    with sym.kv_fork(kv) as one, sym.kv_fork(kv) as other:
        sym.pred_batch([sym.Pred(one, [1, 2, 3]), sym.Pred(other, [4])])
        list(sym.generate(one, PROMPT, max_tokens=30, draft=sym.Ngram(4)))
        list(sym.generate(other, PROMPT, max_tokens=30))
        list(sym.generate(other, [5], max_tokens=8, grammar=sym.Grammar.regex("[ab]+")))
        generation = sym.generate(one, [7], max_tokens=2000)
        next(generation)
        generation.cancel()
        sym.pred(other, [1, 2, 3], top_k=2)


def test_the_tokens_of_all_programs_are_those_that_the_decoder_computed(start_daemon, launch, reach):
    daemon = start_daemon("--model", "tiny", "--kv-memory", "64M")
    reach(daemon)
    launcher = launch(daemon)
    with sym.kv_create() as kv:
        use_the_model(kv)
    sym.close()
    sym.connect(launcher.socket_of(launcher.start("launched")))
    with sym.kv_create() as kv:
        use_the_model(kv)
    killed = daemon.program("print(next(sym.generate(sym.kv_create(), [1], max_tokens=4000)), flush=True); input()")
    killed.stdout.readline()
    killed.kill()
    killed.communicate()
    daemon.shell(f"printf 'some text that is long enough' | tee {daemon.mount}/.symphony/text/a.kv")
    eventually(lambda: sym.daemon_stat()["waiting_calls"] == 0)
    eventually(lambda: tokens_of_programs() == sym.daemon_stat()["num_tokens"])
    found = {each.name: each.usage for each in sym.programs(ended=True)}
    assert sum(each.usage.steps for each in sym.programs(ended=True)) == sym.daemon_stat()["num_calls_in_steps"]
    assert sum(each.usage.calls for each in sym.programs(ended=True)) == sym.daemon_stat()["num_calls"]
    assert found["tee"].tokens == len("some text that is long enough")
    assert found["launched"].tokens > 150
    metrics = (daemon.mount / ".symphony/metrics").read_text()
    of_users = re.findall(r'symphony_user_tokens_total\{user="\d+"\} (\d+)', metrics)
    assert sum(map(int, of_users)) == sym.daemon_stat()["num_tokens"]


@pytest.mark.slow
def test_what_is_counted_is_what_was_given_and_what_came_of_it_and_pages_while_they_are_held(reached):
    with sym.kv_create() as kv:
        before = sym.getrusage()
        sym.pred(kv, [1, 2, 3])
        sym.pred(kv, [1, 2, 3], rows="all")
        sym.kv_write(kv, [4, 5])
        got = list(sym.generate(kv, [6, 7], max_tokens=9))
        for token in (1, 2, 3):
            sym.pred(kv, [token])
        with pytest.raises(sym.Invalid):
            sym.pred(kv, [1] * 4090)
        used = sym.getrusage()
    held, later = sym.getrusage().page_seconds, sym.getrusage().page_seconds
    assert held == later > used.page_seconds > before.page_seconds
    status = (reached.mount / f".symphony/proc/{os.getpid()}/status").read_text()
    assert float(re.findall(r"page_seconds: +(\S+)", status)[0]) == round(held, 6)
    assert used.queue_s >= 0 < used.compute_s
    assert used.tokens_in - before.tokens_in == 3 + 3 + 2 + 2 + 3
    assert used.tokens_out - before.tokens_out == 1 + 3 + 0 + len(got) + 3
    assert (used.calls - before.calls, used.failed_calls - before.failed_calls) == (8, 1)
    assert used.steps - before.steps >= 7
    assert used.bytes_in > before.bytes_in
    assert used.bytes_out > before.bytes_out


def test_what_a_program_has_used_is_that_of_all_its_connections_and_goes_on_where_it_was(reached, launcher):
    path = launcher.socket_of(number := launcher.start(pid=os.getpid()))
    sym.connect(path)
    with sym.kv_create() as kv:
        sym.kv_write(kv, PROMPT)
    child = "import libsym as sym\nsym.kv_write(sym.kv_create(), [1, 2, 3])"
    subprocess.run([sys.executable, "-c", child], env={**os.environ, "SYMPHONY_SOCKET": path}, check=True)
    eventually(lambda: sym.getrusage().tokens == len(PROMPT) + 3)
    sym.close()
    sym.connect(path)
    assert sym.getrusage().tokens == len(PROMPT) + 3
    assert len([each for each in sym.programs() if each.pid == os.getpid() and each.connections]) == 1
    assert launcher.end(number)["tokens"] == len(PROMPT) + 3


def test_a_program_without_a_connection_is_in_proc_and_in_lists(reached, launcher):
    with subprocess.Popen(["sleep", "60"]) as process:
        number = launcher.start("sleeper", limits={"tokens": 1000})
        launcher.request("pid", id=number, pid=process.pid)
        status = (reached.mount / f".symphony/proc/{process.pid}/status").read_text()
        facts = dict(re.findall(r"(\w+): +(.*)\n", status))
        assert (facts["name"], facts["id"], facts["connections"]) == ("sleeper", number, "0")
        assert (facts["state"], facts["limit_tokens"]) == ("idle", "1000")
        found = program(number)
        assert (found.name, found.pid, found.state, found.limits) == ("sleeper", process.pid, "idle", {"tokens": 1000})
        process.kill()
        process.wait()
        launcher.end(number, 137, "killed")
        assert not (reached.mount / f".symphony/proc/{process.pid}").exists()
        ended = program(number)
        assert (ended.status, ended.reason, ended.state) == (137, "killed", "ended")


def test_why_a_program_waits_is_told(reached, launcher):
    number = launcher.start("waiter")
    with sym.kv_create("lock.kv") as kv, sym.kv_lock(kv):
        source = 'kv = sym.kv_open("lock.kv", "rw")\nprint(flush=True)\nsym.kv_lock(kv)'
        environment = {**os.environ, "SYMPHONY_SOCKET": launcher.socket_of(number)}
        command = [sys.executable, "-c", f"import libsym as sym\n{source}"]
        waiter: Any = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
        waiter.stdout.readline()
        eventually(lambda: program(number).state == "waiting for a lock")
        assert program(number).call == "kv_lock"
    waiter.communicate()
    with sym.kv_create() as kv:
        generation = sym.generate(kv, [1], max_tokens=3000)
        next(generation)
        (me,) = [each for each in sym.programs() if each.pid == os.getpid() and each.connections]
        assert (me.state, me.call) == ("computing", "generate")
        generation.cancel()


# ---- limits


def test_a_loop_that_reaches_its_limit_on_tokens_fails_and_its_launcher_is_told(limited, launcher):
    number, kv = limited(tokens=200), sym.kv_create()

    def compute():
        while True:
            sym.pred(kv, [1])

    with pytest.raises(sym.OverQuota, match=rf"program greedy \({number}\) is over its limit on tokens"):
        compute()
    assert launcher.asked.get(timeout=20) == {"do": "limit", "id": number, "what": "tokens"}
    with pytest.raises(sym.OverQuota, match="over its limit on tokens"):
        sym.kv_stat(kv)
    assert sym.getrusage().tokens == 200, "a loop has no more room than it has tokens left"
    kv.close()
    launcher.end(number, 121, "tokens")


WRONG: dict[str, Any] = {"sampler": sym.Sampler(temperature=1000.0, seed=3), "stop_at_end": False}


@pytest.mark.parametrize(
    ("compute", "least", "most"),
    [
        (lambda kv: list(sym.generate(kv, [1], max_tokens=4000)), 1, 400),
        (lambda kv: sym.kv_write(kv, [1] * 401), 0, 0),
        (lambda kv: list(sym.generate(kv, range(256), draft=sym.Ngram(64, min_match=1), **WRONG)), 257, 400),
    ],
    ids=["a generation", "a prompt", "many wrong guesses"],
)
def test_what_goes_beyond_the_limit_fails_and_no_more_is_computed(limited, launcher, compute, least, most):
    limited(tokens=400)
    with sym.kv_create() as kv, pytest.raises(sym.OverQuota, match="limit on tokens"):
        compute(kv)
    assert launcher.asked.get(timeout=20)["what"] == "tokens"
    assert least <= sym.getrusage().tokens <= most


def test_calls_that_fit_a_limit_one_by_one_and_not_together_are_not_all_computed(limited):
    limited(tokens=100)
    files = [sym.kv_create() for _ in range(20)]
    with pytest.raises(sym.BatchFailed, match="90 are under way, and it asks for 90 more"):
        sym.pred_batch([sym.Pred(kv, [1] * 90) for kv in files])
    assert sym.getrusage().tokens <= 100


def test_what_came_of_earlier_calls_leaves_a_limit_as_it_is(limited):
    limited(tokens=100)
    kv, other = sym.kv_create(), sym.kv_create()
    sym.pred_batch([sym.Pred(kv, [1] * 20), sym.Pred(other, [1] * 20)])
    generation = sym.generate(kv, [1] * 5, max_tokens=40)
    next(generation)
    generation.cancel()
    with pytest.raises(sym.Invalid):
        sym.pred(other, [1] * 3, positions=[-1] * 3)
    sym.kv_write(other, [1] * (100 - sym.getrusage().tokens))
    assert sym.getrusage().tokens == 100
    with pytest.raises(sym.OverQuota, match="computed 100 of its 100 tokens, and it asks for 1 more"):
        sym.kv_write(other, [1])


def test_pages_are_limited_by_what_is_open_at_once_and_shared_ones_count_once(limited, launcher):
    number, kv = limited(pages=4), sym.kv_create()
    kv.write([1] * 96)
    forks = [sym.kv_fork(kv) for _ in range(10)]
    kv.write([2] * 32)
    for each in forks:
        each.close()
    with pytest.raises(sym.OverQuota, match="it has 4 of its 4 pages, and asks for 1 more"):
        kv.write([3])
    assert launcher.asked.get(timeout=20) == {"do": "limit", "id": number, "what": "pages"}


def test_page_seconds_are_limited_though_nothing_is_asked_for(limited, launcher):
    number, kv = limited(page_seconds=0.1), sym.kv_create()
    kv.write([1] * 96)
    assert launcher.asked.get(timeout=20) == {"do": "limit", "id": number, "what": "page_seconds"}


# ---- admission, restarts


def test_a_user_s_programs_are_admitted_up_to_a_number_and_survive_a_restart_of_the_daemon(start_daemon, launch, reach):
    daemon = reach(start_daemon("--model", "tiny", "--kv-memory", "8M", "--programs", "2"))
    launcher = launch(daemon)
    number, ended = launcher.start("long", limits={"tokens": 1000}), launcher.start("short")
    with pytest.raises(Refused, match=r"uid \d+ has 2 programs, and 2 at once are the most \(--programs\)") as refused:
        launcher.start()
    assert refused.value.errno == 11
    launcher.end(ended, 3)
    assert (sym.daemon_stat()["programs_refused"], sym.daemon_stat()["launchers"]) == (1, 1)
    assert "symphony_programs_refused_total 1\n" in (daemon.mount / ".symphony/metrics").read_text()
    sym.close()
    daemon.stop()
    daemon = start_daemon("--model", "tiny", "--kv-memory", "8M")
    launcher = launch(daemon)
    launcher.start("long", id=number, again=True)
    sym.connect(launcher.socket_of(number))
    sym.kv_create().write([4, 5])
    assert sym.getrusage().tokens == 2
    found = program(ended)
    assert (found.name, found.status, found.reason) == ("short", 3, "exit")
    with pytest.raises(Refused, match="has ended"):
        launcher.start("short", id=ended, again=True)


def test_launcher_and_daemon_of_different_releases_agree_on_a_version_of_their_messages(reached, launcher):
    def start(**words):
        return launcher.request("start", id=os.urandom(4).hex(), name="prog", limits={}, **words)

    assert start()["protocol"] == 1  # of the release before: it says nothing
    assert start(protocol=PROTOCOL)["protocol"] == PROTOCOL == daemon_link.PROTOCOL
    assert start(protocol=PROTOCOL + 5, news={"of": "then"})["protocol"] == PROTOCOL
    with pytest.raises(Refused, match=r"another release \(it speaks version 0, .* `symphony run` starts one of this"):
        start(protocol=0)
    with pytest.raises(Refused, match="there is no request 'sing'"):
        launcher.request("sing")
    assert start()["protocol"] == 1
