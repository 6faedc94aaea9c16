"""Messages between real programs: order, topics, Ctrl-C, fork, readers that stop, other users, domains."""

import json
import os
import re
import signal
import sys

import pytest

BOB = 12346
AS_BOB = f"os.setgroups([]); os.setgid({BOB}); os.setuid({BOB})\n"

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="NO OTHER USERS TESTED: they need root")

READER = """
print(sym.getpid(), flush=True)
while (x := sym.recv()) != "end":
    print(repr(x), flush=True)
"""


def send(daemon, to, *messages):
    """Send messages from a program of its own; return each call's result."""
    return json.loads(
        daemon.run(f"import json\nprint(json.dumps([sym.send({to!r}, x) for x in {messages!r}]))", sys.executable)
    )


def pid_of(program):
    return int(program.stdout.readline())


def finish(program):
    out, err = program.communicate(timeout=60)
    assert program.returncode == 0, err
    return out


def test_messages_arrive_in_order_and_as_what_they_were(daemon):
    reader = daemon.program(READER)
    pid = pid_of(reader)
    sent = ("text \u20ac", b"bytes \xff", {"a": [1, None, 2.5]}, [], "", b"", 7)
    assert send(daemon, pid, *sent) == [1] * len(sent)
    send(daemon, pid, "end")
    assert finish(reader).splitlines() == [repr(x) for x in sent]


def test_one_message_goes_to_one_of_many_threads(daemon):
    out = daemon.run(
        """
        got, lock = [], threading.Lock()
        def read():
            x = sym.recv()
            with lock: got.append(x)
        threads = [threading.Thread(target=read) for _ in range(100)]
        for thread in threads: thread.start()
        me = sym.getpid()
        for number in range(100): assert sym.send(me, number) == 1
        for thread in threads: thread.join()
        print(sorted(got) == list(range(100)))
        try: sym.recv(timeout=0)
        except sym.WouldBlock as error: print(error)
        """
    )
    assert out == "True\nthere is no message in the mailbox\n"


@pytest.mark.slow
def test_a_topic_reaches_every_process_that_reads_it(daemon):
    source = 'sym.subscribe("news"); print(sym.getpid(), flush=True); print(sym.recv("news"), sym.recv("news"))'
    readers = [daemon.program(source) for _ in range(5)]
    for reader in readers:
        pid_of(reader)
    assert send(daemon, "news", "one", "two") == [5, 5]
    assert [finish(reader) for reader in readers] == ["one two\n"] * 5
    assert send(daemon, "news", "three") == [0]


def num_recv_calls(daemon):
    """How many the daemon has taken."""
    found = re.search(r'op="recv"} (\d+)', (daemon.mount / ".symphony/metrics").read_text())
    return int(found.group(1)) if found else 0


def test_ctrl_c_ends_a_recv(daemon):
    reader = daemon.program(
        """
        print(sym.getpid(), flush=True)
        try: sym.recv()
        except KeyboardInterrupt: print("interrupted", flush=True)
        print(sym.recv())
        """
    )
    before = num_recv_calls(daemon)
    pid = pid_of(reader)
    while num_recv_calls(daemon) == before:
        pass
    reader.send_signal(signal.SIGINT)
    assert reader.stdout.readline() == "interrupted\n"
    send(daemon, pid, "x")
    assert finish(reader) == "x\n", "the wait that was interrupted took nothing"


def test_a_message_whose_reply_nobody_looked_at_comes_again(daemon):
    """A program that Ctrl-C hits between the arrival of a message and its use gets that message again."""
    out = daemon.run(
        """
        from libsym.abi import Op
        from libsym.channel.scripts import Call
        from libsym.channel.process import process
        me, channel = sym.getpid(), process.channel()
        for x in ("short", "long" * 1000): sym.send(me, x)
        for _ in range(3):
            for _ in range(2): print(channel.perform(Call(Op.RECV, args=(0, 0, 0, 0))).payload[:5])
        print(sym.recv(timeout=0), len(sym.recv(timeout=0)))
        """
    )
    assert out.splitlines()[-1] == "short 4000"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_tasks_that_are_cancelled_take_no_message_away(daemon, backend):
    out = daemon.run(
        """
        import anyio
        got = []
        async def main():
            me = await sym.aio.getpid()
            async def read():
                got.append(await sym.aio.recv())
            for turn in range(20):
                async with anyio.create_task_group() as tasks:
                    for _ in range(50): tasks.start_soon(read)
                    await sym.aio.getpid()
                    for number in range(30): await sym.aio.send(me, turn * 30 + number)
                    tasks.cancel_scope.cancel()
            while True:
                try: got.append(await sym.aio.recv(timeout=0))
                except sym.WouldBlock: break
        anyio.run(main, backend=sys.argv[1])
        print(sorted(got) == list(range(600)), len(got))
        """,
        backend,
    )
    assert out == "True 600\n"


def test_a_child_by_fork_has_a_pid_and_a_mailbox_of_its_own(daemon):
    out = daemon.run(
        """
        parent = sym.getpid()
        child = os.fork()
        if child == 0:
            assert sym.getpid() == os.getpid() != parent
            sym.send(parent, os.getpid())
            sym.send(parent, sym.recv() + 1)
            os._exit(0)
        assert sym.recv() == child
        sym.send(child, 41)
        print(sym.recv())
        os.waitpid(child, 0)
        """
    )
    assert out == "42\n"


@pytest.mark.slow
def test_readers_that_stop_delay_nobody(daemon):
    """A reader never receives; another is stopped with its threads in recv and its ring full. Other readers notice
    neither.
    """
    lazy = daemon.program('sym.subscribe("flood"); print(sym.getpid(), flush=True); sys.stdin.read()')
    stopped = daemon.program(
        """
        sym.subscribe("flood")
        got = []
        def read():
            try: got.append(len(sym.recv("flood")))
            except sym.NoBuffers: got.append("lost")
        threads = [threading.Thread(target=read) for _ in range(20)]
        for thread in threads: thread.start()
        print(sym.getpid(), flush=True)
        for thread in threads: thread.join()
        print(len(got) - got.count("lost"), got.count("lost"))
        """
    )
    eager = daemon.program(
        """
        sym.subscribe("flood")
        print(sym.getpid(), flush=True)
        count = 0
        while (x := sym.recv("flood")) != "end": count += 1
        print(count)
        """
    )
    pids = [pid_of(program) for program in (lazy, stopped, eager)]
    stopped.send_signal(signal.SIGSTOP)
    try:
        out = daemon.run(
            """
            lazy, stopped, eager = map(int, sys.argv[1:])
            kv, reached = sym.kv_create(), []
            for number in range(40):
                reached.append(sym.send("flood", b"x" * 300_000))
                sym.pred(kv, [1])
            for pid in (lazy, stopped):
                try:
                    while True: sym.send(pid, b"x" * 300_000)
                except sym.WouldBlock: print("full")
            sym.send("flood", "end")
            print(max(reached), min(reached) >= 1, len(kv))
            """,
            *map(str, pids),
        )
        assert out.splitlines() == ["full", "full", "3 True 40"]
        assert int(finish(eager)) >= 1
    finally:
        stopped.send_signal(signal.SIGCONT)
    # What was held back comes now; what was too much was lost, and one recv says so.
    send(daemon, "flood", *("small" for _ in range(20)))
    messages, lost = map(int, finish(stopped).split())
    assert messages + lost == 20
    assert lost == 1
    finish(lazy)


def test_a_reader_is_told_what_it_lost(daemon):
    out = daemon.run(
        """
        sym.subscribe("t")
        reached = [sym.send("t", b"x" * 500_000) for _ in range(10)]
        try: sym.recv("t")
        except sym.NoBuffers as error: print(error)
        print(reached, sum(1 for _ in range(sum(reached)) if sym.recv("t")))
        """
    )
    lines = out.splitlines()
    assert lines[0].startswith("6 messages of the topic t were lost")
    assert lines[1] == "[1, 1, 1, 1, 0, 0, 0, 0, 0, 0] 4"


@pytest.mark.slow
@needs_root
def test_other_users_are_out_of_reach_and_root_reaches_everybody(start_daemon, tmp_path):
    for directory in (tmp_path, *tmp_path.parents[:3]):
        if str(directory) != "/tmp":
            directory.chmod(0o755)
    daemon = start_daemon("--model", "tiny", "--kv-memory", "8M")
    bob = daemon.program(AS_BOB + READER)
    pid = pid_of(bob)
    root = daemon.program('sym.subscribe("t")\n' + READER)
    root_pid = pid_of(root)
    out = daemon.run(
        AS_BOB
        + f"""
try: sym.send({root_pid}, "x")
except sym.NotPermitted as error: print(error)
print(sym.send("t", "x"), sym.send({pid}, "from bob"))
"""
    )
    assert out == f"process {root_pid} is another account's: uid {BOB} can't send to it\n0 1\n"
    assert send(daemon, pid, "from root", "end") == [1, 1]
    assert send(daemon, root_pid, "end") == [1]
    assert finish(bob) == "'from bob'\n'from root'\n"
    assert finish(root) == ""


def test_a_connection_that_is_confined_to_a_domain_reaches_nobody_outside(daemon):
    (daemon.mount / "key").mkdir()
    os.setxattr(daemon.mount / "key", "user.kv.quota", b"1M")
    outside = daemon.program('sym.subscribe("t")\n' + READER)
    inside = daemon.program('sym.connect(domain="key"); sym.subscribe("t")\n' + READER)
    outside_pid, inside_pid = pid_of(outside), pid_of(inside)
    out = daemon.run(
        f"""
        sym.connect(domain="key")
        try: sym.send({outside_pid}, "x")
        except sym.NotFound: print("nobody there")
        print(sym.send("t", "x"), sym.send({inside_pid}, "end"))
        """
    )
    assert out == "nobody there\n1 1\n"
    finish(inside)
    assert send(daemon, outside_pid, "end") == [1]
    finish(outside)


def test_recv_from_user_gives_lines_and_then_the_end(daemon):
    program = daemon.program(
        """
        while True:
            try: print(repr(sym.recv_from_user()))
            except EOFError: break
        """
    )
    program.stdin.write("one\n\ntwo \u20ac\nunfinished")
    assert finish(program) == "'one'\n''\n'two \u20ac'\n'unfinished'\n"


@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_a_task_that_waits_for_the_user_can_be_cancelled_and_loses_no_line(daemon, backend):
    program = daemon.program(
        """
        import anyio
        async def main():
            with anyio.move_on_after(0.01): await sym.aio.recv_from_user()
            print("ready", flush=True)
            while True:
                try: await sym.aio.send_to_user([await sym.aio.recv_from_user()])
                except EOFError: break
        anyio.run(main, backend=sys.argv[1])
        """,
        backend,
    )
    assert program.stdout.readline() == "ready\n"
    program.stdin.write("one\ntwo\nend")
    assert finish(program) == '["one"]\n["two"]\n["end"]\n'


def test_what_was_used_shows_in_getrusage_and_in_the_status_file(daemon):
    out = daemon.run(
        """
        import json
        kv = sym.kv_create()
        sym.kv_write(kv, [1] * 100)
        sym.pred(kv, [1])
        try: sym.pred(kv, [1], 10**8)
        except sym.Invalid: pass
        first, second = sym.getrusage(), sym.getrusage()
        assert second.page_seconds > first.page_seconds > 0
        kv.close()
        closed = sym.getrusage().page_seconds
        assert sym.getrusage().page_seconds == closed >= second.page_seconds
        assert first.queue_s >= 0 and first.compute_s > 0
        status = dict(line.split(":", 1) for line in open(f"{sys.argv[1]}/.symphony/proc/{sym.getpid()}/status"))
        assert float(status["page_seconds"]) == round(closed, 6)
        print(first.calls, first.tokens, sym.getpid() == os.getpid())
        """,
        str(daemon.mount),
    )
    assert out == "2 101 True\n"


def test_kv_sync_waits_for_what_came_before_and_an_anonymous_file_can_not_be_kept(daemon):
    out = daemon.run(
        """
        kv = sym.kv_create()
        thread = threading.Thread(target=sym.kv_write, args=(kv, [1] * 400))
        thread.start()
        while not sym.getrusage().calls and not len(kv) and thread.is_alive(): pass
        try: sym.kv_sync(kv)
        except sym.NotSupported as error: print(error.errno, len(kv))
        thread.join()
        """
    )
    assert out == "95 400\n"


def test_a_file_with_a_ttl_is_gone_in_a_while_and_a_pinned_one_is_not(daemon):
    out = daemon.run(
        """
        for name in ("short.kv", "pinned.kv", "open.kv", "shell.kv"): sym.kv_create(name).close()
        kept = sym.kv_open("open.kv")
        sym.kv_advise("pinned.kv", sym.TTL(0.01), sym.PIN)
        sym.kv_advise(kept, sym.TTL(0.01))
        os.setxattr(f"{sys.argv[1]}/shell.kv", "user.kv.ttl", b"0.01")
        sym.kv_advise("short.kv", sym.TTL(0.02), sym.PRIORITY(5))
        stat = sym.kv_stat("pinned.kv")
        print(stat.pinned, stat.ttl_s, os.getxattr(f"{sys.argv[1]}/pinned.kv", "user.kv.ttl"))
        names = lambda: {entry.name for entry in sym.kv_list()}
        while names() & {"short.kv", "shell.kv"}: pass
        print(sorted(set(os.listdir(sys.argv[1])) & {"short.kv", "shell.kv", "pinned.kv", "open.kv"}))
        assert not os.path.exists(f"{sys.argv[1]}/shell.kv")
        kept.close()
        while "open.kv" in names(): pass
        sym.kv_remove("pinned.kv")
        for advice in (sym.COLD, sym.WILLNEED):
            with sym.kv_create() as kv: sym.kv_advise(kv, advice)
        """,
        str(daemon.mount),
    )
    assert out == "True 0.01 b'0.01'\n['open.kv', 'pinned.kv']\n"


@pytest.mark.slow
@needs_root
def test_advice_is_the_owners_on_the_mount_and_in_a_call(start_daemon, tmp_path):
    for directory in (tmp_path, *tmp_path.parents[:3]):
        if str(directory) != "/tmp":
            directory.chmod(0o755)
    daemon = start_daemon("--model", "tiny", "--kv-memory", "8M")
    daemon.run('sym.kv_create("a.kv", 0o666).close()')
    out = daemon.run(
        AS_BOB
        + """
for change in (
    lambda: sym.kv_advise("a.kv", sym.TTL(1)),
    lambda: sym.kv_advise(sym.kv_open("a.kv", "rw"), sym.PIN),
    lambda: os.setxattr(sys.argv[1], "user.kv.ttl", b"1"),
    lambda: os.removexattr(sys.argv[1], "user.kv.pinned"),
):
    try: change()
    except OSError as error: print(error.errno)
sym.kv_advise("a.kv", sym.WILLNEED)
print(os.getxattr(sys.argv[1], "user.kv.ttl"))
""",
        str(daemon.mount / "a.kv"),
    )
    assert out == "1\n1\n1\n1\nb'0'\n"


@pytest.mark.slow
def test_du_of_more_files_than_a_message_holds(daemon):
    out = daemon.run(
        """
        os.mkdir(f"{sys.argv[1]}/many")
        with sym.kv_create("many/base.kv") as base:
            sym.kv_write(base, [1] * 40)
            for number in range(9000): sym.kv_fork(base, f"many/{number}.kv").close()
        found = sym.kv_du("many")
        print(len(found["rows"]), found["total"]["pages"], found["total"]["exclusive_pages"], found["denied"])
        """,
        str(daemon.mount),
    )
    assert out == "9001 2 2 []\n"
