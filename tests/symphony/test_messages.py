"""Messages and lines of the user between real programs. `tests/scheduler/test_mail.py` proves who gets what."""

import threading
from contextlib import suppress
from typing import Any

import anyio
import pytest

import libsym as sym
from libsym.abi import Op
from libsym.channel.process import process
from libsym.channel.scripts import Call
from tests.symphony.launchers import eventually

READER = """
    sym.subscribe("news")
    print(sym.getpid(), flush=True)
    while (x := sym.recv()) != "end": print(repr(x), flush=True)
    print(sym.recv("news"))
"""


def test_messages_arrive_in_order_as_what_they_were_and_a_topic_reaches_all_who_read_it(shared):
    readers = [shared.program(READER) for _ in range(2)]
    first, second = (int(each.stdout.readline()) for each in readers)
    sent: list[Any] = ["text \u20ac", b"bytes \xff", {"a": [1, None, 2.5]}, [], "", b"", 7]
    assert [sym.send(first, x) for x in (*sent, "end")] == [1] * 8
    assert (sym.send(second, "end"), sym.send("news", "old")) == (1, 2)
    outputs = [each.communicate(timeout=60) for each in readers]
    assert outputs == [("".join(f"{x!r}\n" for x in sent) + "old\n", ""), ("old\n", "")]
    eventually(lambda: sym.send("news", "nobody") == 0)  # the daemon may see the readers' ends a little later


def test_a_message_whose_reply_nobody_looked_at_comes_again(shared):
    """A program that Ctrl-C hits between the arrival of a message and its use gets that message again."""
    me, channel = sym.getpid(), process.channel()
    for x in ("short", "long" * 1000):
        sym.send(me, x)
    for _ in range(6):
        channel.perform(Call(Op.RECV, args=(0, 0, 0, 0)))
    assert (sym.recv(timeout=0), len(sym.recv(timeout=0))) == ("short", 4000)
    with pytest.raises(sym.WouldBlock, match="there is no message in the mailbox"):
        sym.recv(timeout=0)


async def test_tasks_that_are_cancelled_take_no_message_away(shared, backend):
    got = []
    me = await sym.aio.getpid()

    async def read():
        got.append(await sym.aio.recv())

    for turn in range(10):
        async with anyio.create_task_group() as tasks:
            for _ in range(50):
                tasks.start_soon(read)
            await sym.aio.getpid()
            for number in range(30):
                await sym.aio.send(me, turn * 30 + number)
            tasks.cancel_scope.cancel()
    with suppress(sym.WouldBlock):
        while True:
            got.append(await sym.aio.recv(timeout=0))
    assert sorted(got) == list(range(300))


PLAIN = """
    print("ready", flush=True)
    while True:
        try: print(repr(sym.recv_from_user()))
        except EOFError: break
"""
TASK = """
    import anyio
    async def main():
        with anyio.move_on_after(0.01): await sym.aio.recv_from_user()
        print("ready", flush=True)
        while True:
            try: await sym.aio.send_to_user(repr(await sym.aio.recv_from_user()) + "\\n")
            except EOFError: break
    anyio.run(main, backend=sys.argv[1])
"""


@pytest.mark.parametrize(("source", "backend"), [(PLAIN, ""), (TASK, "trio"), (TASK, "asyncio")])
def test_recv_from_user_gives_lines_and_then_the_end_and_a_cancelled_wait_loses_none(shared, source, backend):
    program = shared.program(source, backend)
    assert program.stdout.readline() == "ready\n"
    out = program.communicate("one\n\ntwo \u20ac\nunfinished", timeout=60)
    assert out == ("'one'\n''\n'two \u20ac'\n'unfinished'\n", "")


def test_kv_sync_waits_for_what_came_before_and_an_anonymous_file_can_not_be_kept(shared):
    with sym.kv_create() as kv:
        before = sym.getrusage().calls
        thread = threading.Thread(target=sym.kv_write, args=(kv, [1] * 400))
        thread.start()
        while sym.getrusage().calls == before and thread.is_alive() and not len(kv):
            pass
        with pytest.raises(sym.NotSupported):
            sym.kv_sync(kv)
        assert len(kv) == 400
        thread.join()
