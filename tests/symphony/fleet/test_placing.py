"""Where programs would run, as members of a fleet in one process see it."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvfs.names.inode import Credentials
from libsym.errors import Invalid, NoAccess, NotFound, ProtocolError, SymError
from symphony.fleet import placement, placing
from symphony.fleet.client import Peers
from symphony.fleet.link import Held, ask_of, contexts, held_of
from symphony.fleet.membership import Load
from symphony.fleet.placing import Placer
from tests.symphony.etcd import EtcdServer
from tests.symphony.fleet.members import ROOT, USER, Member, fleet_of
from tests.symphony.fleet.test_names import keys, server

IDLE = Load(0, 7000, 500, 0)
NAMES = ["east", "north", "west"]


__all__ = ["keys", "server"]


class Side:
    """A member, with what it publishes and the choice that it makes."""

    def __init__(self, member: Member, keys: Path) -> None:
        self.member, self.name = member, member.name
        self.facts = replace(member.membership._mine(), load=IDLE, identity=dict(member.fs.volume.model.identity))
        member.membership._mine = lambda: self.facts
        peers = Peers(member.fs, member.membership.addresses, contexts(keys / member.name)[1])
        self.placer = Placer(member.fs, member.membership, member.names, peers)

    async def place(self, *paths: str, creds: Credentials = ROOT, begins: bool = False) -> dict[str, Any]:
        return await self.placer.place(creds, paths, begins=begins)

    async def chosen(self, *paths: str) -> str:
        return str((await self.place(*paths))["machine"])


@pytest.fixture
def in_fleet(
    tmp_path: Path, keys: Path, server: EtcdServer, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AbstractAsyncContextManager[list[Side]]:
    """Three machines of a fleet. Their network is slow, because their files are small."""
    monkeypatch.setattr(placement, "LINK_BYTES_S", 1e3)
    monkeypatch.setattr(placement, "EVICT_BYTES_S", 1e6)
    fleet = "".join(each if each.isalnum() else "-" for each in request.node.name)

    @asynccontextmanager
    async def running() -> AsyncIterator[list[Side]]:
        async with fleet_of(tmp_path, keys, server.url, fleet, NAMES) as members:
            sides = [Side(member, keys) for member in members]
            await publish(*sides)
            yield sides

    return running()


async def publish(*sides: Side) -> None:
    """Let all machines see the facts of all."""
    for each in (*sides, *sides):
        await each.member.membership._renew()


def busy(side: Side, backlog_s: float) -> None:
    side.facts = replace(side.facts, load=replace(IDLE, backlog_us=round(backlog_s * 1e6)))


async def synced(side: Side, path: str, length: int = 100) -> None:
    """Make a file of the fleet, which only this machine has."""
    file = await side.member.make(path, length)
    await side.member.names.sync(file.inode)
    side.member.fs.kv_close(file)


async def test_a_program_is_placed_where_the_version_of_its_file_is(in_fleet):
    async with in_fleet as (east, north, west):
        await synced(west, "fleet/a.kv")
        for side in (east, north, west):
            found = await side.place("fleet/a.kv")
            assert (found["machine"], found["here"], found["entries"]) == ("west", side.name, 100)
            assert found["reason"] == "all 100 entries of the files are there"
            assert {name: each["entries"] for name, each in found["machines"].items()} == {
                "east": 0,
                "north": 0,
                "west": 100,
            }


async def test_a_machine_that_has_fetched_the_version_is_known_when_the_first_one_is_busy(in_fleet):
    async with in_fleet as (east, north, west):
        await synced(west, "fleet/a.kv")
        assert await north.member.length("fleet/a.kv") == 100
        busy(west, 60)
        await publish(east, north, west)
        assert await east.chosen("fleet/a.kv") == "north"
        busy(north, 60)
        await publish(east, north, west)
        found = await east.place("fleet/a.kv")
        assert found["machine"] == "east"
        assert found["reason"] == (
            "0 of 100 entries of the files are there, and machines with more of them have more load or no memory"
        )


async def test_a_peer_that_does_not_answer_counts_as_its_records_say(in_fleet, monkeypatch):
    monkeypatch.setattr(placing, "ASK_S", 0.2)
    async with in_fleet as (east, _north, west):
        await synced(west, "fleet/a.kv")
        east.placer._peers._addresses = {"north": ("127.0.0.1", 1)}
        assert await east.chosen("fleet/a.kv") == "west"


async def test_a_file_of_one_machine_keeps_its_program_there(in_fleet):
    async with in_fleet as (east, north, west):
        await synced(west, "fleet/a.kv", 200)
        east.member.fs.kv_close(await east.member.make("own.kv", 50))
        busy(east, 60)
        await publish(east, north, west)
        found = await east.place("own.kv", "fleet/a.kv")
        assert (found["machine"], found["reason"]) == ("east", "own.kv is a file of this machine alone")
        assert found["machines"]["west"]["refusal"] == "own.kv is a file of east alone"
        with pytest.raises(NotFound, match=r"own.kv"):
            await west.place("own.kv")


async def test_a_program_without_files_goes_to_the_least_load(in_fleet):
    async with in_fleet as (east, north, west):
        busy(east, 5)
        busy(west, 5)
        await publish(east, north, west)
        found = await west.place()
        assert (found["machine"], found["reason"]) == ("north", "its load is among the least")


async def test_programs_that_begin_are_load_until_the_machine_publishes_its_own(in_fleet, monkeypatch):
    async with in_fleet as (east, _north, _west):
        chosen = [(await east.place(begins=True))["machine"] for _ in range(30)]
        assert {chosen.count(name) for name in NAMES} == {10}
        monkeypatch.setattr(placing, "PLACED_S", 0.0)
        await east.place()
        assert not east.placer._placed


async def test_machines_of_another_model_or_an_earlier_release_are_refused_and_the_message_says_why(in_fleet):
    async with in_fleet as (east, north, west):
        await synced(west, "fleet/a.kv")
        west.facts = replace(west.facts, load=None)
        north.facts = replace(north.facts, identity={"model": "other"})
        await publish(east, north, west)
        machines = (await east.place())["machines"]
        assert [machines[name]["refusal"] for name in NAMES] == [
            "",
            "another model",
            "its daemon is of an earlier release",
        ]
        assert (machines["north"]["delay_s"], machines["west"]["calls"]) == (None, None)
        east.facts = replace(east.facts, load=None)
        with pytest.raises(
            SymError, match=r"no machine .* \(east: its daemon is .*; north: another model; west: its d"
        ):
            await east.place("fleet/a.kv")


async def test_only_files_that_the_user_may_read_are_told_of(in_fleet):
    async with in_fleet as (east, _, west):
        await synced(west, "fleet/a.kv")
        with pytest.raises(NoAccess):
            await east.place("fleet/a.kv", creds=USER)
        with pytest.raises(NotFound):
            await east.place("fleet/b.kv")
        with pytest.raises(Invalid, match="is a directory"):
            await east.place("fleet")
        with pytest.raises(Invalid, match="at most 64"):
            await east.place(*["fleet/a.kv"] * 65)
        confined = Credentials(0, 0, root=east.member.tree.root)
        with pytest.raises(Invalid, match="confined"):
            await east.place(creds=confined)


async def test_an_empty_file_of_the_fleet_has_no_pages_anywhere(in_fleet):
    async with in_fleet as (east, _, west):
        west.member.fs.kv_close(await west.member.call(west.member.fs.kv_create, ROOT, "fleet/a.kv"))
        assert (await east.place("fleet/a.kv"))["entries"] == 0


async def test_without_etcd_the_versions_count_that_the_machine_knows(in_fleet):
    async with in_fleet as (east, _, west):
        await synced(west, "fleet/a.kv")
        assert await east.chosen("fleet/a.kv") == "west"
        east.member.etcd._endpoints[0]._port = 1  # nobody listens there
        east.member.etcd.close()
        assert await east.chosen("fleet/a.kv") == "west"
        assert east.member.names.trouble


@pytest.mark.parametrize("held", [[1] * 2, ["1"], [-1], [1 << 63], 1, [None]])
def test_a_malformed_answer_about_versions_is_an_error(held):
    with pytest.raises(ProtocolError, match="east answered"):
        held_of({"held": held}, Held(["a.1"]), "east")
    with pytest.raises(NoAccess, match="east: no"):
        held_of({"errno": 13, "message": "no"}, Held(["a.1"]), "east")


@pytest.mark.parametrize("held", [["a"], ["../a.1"], [1], ["a.1"] * 65])
def test_a_malformed_question_about_versions_is_refused(held):
    with pytest.raises(ProtocolError, match="a peer asked for"):
        ask_of({"held": held})
