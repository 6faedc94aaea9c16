"""kv_list at the gate: any number of names, in order, while the directory changes."""

import json
import stat
from typing import Any

import pytest
import trio
import trio.testing

from kvfs.names.tree import Credentials
from libsym.abi import Op
from libsym.channel.server import PAYLOAD_BYTES, Request
from libsym.errors import NoAccess, NotDirectory
from scheduler.connection.lip import Lip
from scheduler.connection.system_call import SystemCall
from scheduler.operations.directories import Listing
from tests.scheduler.bench import Bench

ME = Credentials(1000, 1000)
NO_CHANNEL: Any = None


class Lists(Bench):
    """A directory `d` of the caller's, and the gate's half of kv_list."""

    def __init__(self, tmp_path):
        super().__init__(tmp_path, num_pages=1)
        self.directory = self.tree.make(self.tree.root, b"d", stat.S_IFDIR, mode=0o700, uid=1000, gid=1000)
        self.listing = Listing(self.fs)

    def make(self, name):
        self.tree.make(self.directory, name, stat.S_IFLNK, mode=0o777, uid=1000, gid=1000)

    def begin(self, payload, creds=ME):
        request = Request(Op.KV_LIST, 0, 1, 0, (0, 0, 0, 0), payload)
        return self.listing.list(SystemCall(Lip(1, creds, NO_CHANNEL), request))

    def page(self, path="d", after="", creds=ME):
        """Return one reply: whether there is more, and its names."""
        payload = f"{path}\0{after}".encode("utf-8", "surrogateescape")
        rest = self.begin(payload, creds)
        reply = trio.run(lambda: rest)
        assert len(reply.payload) <= PAYLOAD_BYTES
        return bool(reply.args[0]), [entry["name"] for entry in json.loads(reply.payload)]

    def whole(self):
        names, more = list[str](), True
        while more:
            more, page = self.page(after=names[-1] if names else "")
            names += page
        return names


@pytest.fixture
def bench(tmp_path):
    return Lists(tmp_path)


@pytest.mark.parametrize("count", [0, 1, 499, 500, 501, 2000])
def test_every_name_is_listed_once_in_order(bench, count):
    names = [b"%05d" % index for index in range(count)]
    for name in reversed(names):
        bench.make(name)
    assert bench.whole() == [name.decode() for name in names]


def test_names_of_any_bytes_fill_replies_to_the_brim(bench):
    names = sorted(bytes([0x80 | first, second]) + b"\xff" * 253 for first in range(32) for second in range(1, 33))
    for name in names:
        bench.make(name)
    more, first = bench.page()
    assert more
    assert len(first) > 500
    assert [name.encode("utf-8", "surrogateescape") for name in bench.whole()] == names


def test_names_that_go_between_two_turns_are_left_out(bench):
    for index in range(300):
        bench.make(b"%03d" % index)

    async def main():
        async with trio.open_nursery() as nursery:
            rest = bench.begin(b"d")

            async def remove():
                bench.tree.unlink(bench.directory, b"299")
                bench.make(b"500")

            nursery.start_soon(remove)
            return await rest

    names = [entry["name"] for entry in json.loads(trio.run(main).payload)]
    assert names == [f"{index:03}" for index in range(299)]


def test_what_may_not_be_listed_is_refused_at_once(bench):
    bench.make(b"link")
    with pytest.raises(NoAccess):
        bench.page(creds=Credentials(1001, 1001))
    bench.tree.make(bench.directory, b"file", stat.S_IFIFO, mode=0o777, uid=1000, gid=1000)
    with pytest.raises(NotDirectory):
        bench.page("d/file")
