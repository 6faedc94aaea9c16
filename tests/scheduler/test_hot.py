"""kv_hot at the gate: the hottest files, each path once, however names change while it looks."""

import json
from functools import partial

import pytest
import trio

from libsym.abi import Op
from libsym.channel.server import Request
from libsym.errors import Invalid
from scheduler.connection.system_call import SystemCall
from scheduler.operations.hot import FILES_A_TURN, MAX_FILES, Hot
from tests.scheduler.bench import ME

NAMES = [f"{number:02}.kv" for number in range(5 * FILES_A_TURN)]


def ask(bench, limit):
    return Hot(bench.fs).hot(SystemCall(bench.lip(), Request(Op.KV_HOT, 0, 1, 0, (limit, 0, 0, 0), b"")))


def paths(reply):
    return [each["path"] for each in json.loads(reply.payload)]


@pytest.fixture
def files(bench):
    for name in NAMES:
        bench.fs.kv_close(bench.fs.kv_create(ME, name))


def test_no_more_are_told_than_are_asked_for(bench, files):
    assert len(paths(trio.run(partial(wait, ask(bench, 5))))) == 5
    assert sorted(paths(trio.run(partial(wait, ask(bench, MAX_FILES))))) == NAMES


@pytest.mark.parametrize("limit", [-1, 0, MAX_FILES + 1])
def test_a_number_that_nobody_can_mean_is_refused(bench, limit):
    with pytest.raises(Invalid, match=f"not of {limit}"):
        ask(bench, limit)


def test_a_file_that_takes_the_name_of_another_one_meanwhile_is_told_once(bench, files):
    begun, found = [], []

    async def look():
        begun.append(True)
        found.extend(paths(await ask(bench, MAX_FILES)))

    def replace():
        """The hottest file was looked at already, the coldest was not."""
        coldest, hottest = [inode.names for inode in reversed(bench.fs.volume.heat.hottest(0))][:: len(NAMES) - 1]
        old, new = (next(iter(names))[1].decode() for names in (coldest, hottest))
        bench.fs.kv_rename(ME, old, new)

    async def both():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(look)
            while not begun:
                await trio.lowlevel.checkpoint()
            replace()

    trio.run(both)
    assert len(found) == len(set(found)) == len(NAMES) - 1


async def wait(reply):
    return await reply
