"""Counts of what the machines of a fleet hold: fake names, and no etcd."""

from types import SimpleNamespace
from typing import Any

import trio

from symphony.fleet.draining import Draining, Holding
from symphony.fleet.mirror import Item
from symphony.fleet.records import NameRecord

NUM_FILES = 200


class Names:
    """Files of the machine east, and the number of times that they were counted."""

    def __init__(self) -> None:
        record = NameRecord("file", 0o644, 0, 0, tag="tag", num_entries=32, size=1000, machines=("east",))
        inode: Any = SimpleNamespace(content=None)
        self.files = {str(number): Item(str(number), inode, record, 1) for number in range(NUM_FILES)}
        self.num_counts = 0
        self.writing = dict[str, str]()

    @property
    def by_ident(self) -> dict[str, Item]:
        self.num_counts += 1
        return self.files

    def path_of(self, item: Item) -> str:
        return f"/fleet/{item.ident}.kv"


class Follower:
    """A follower that etcd does not answer."""

    trouble = "etcd is away"


async def test_one_count_answers_all_questions_that_wait_and_names_no_paths():
    names, follower = Names(), Follower()
    membership = SimpleNamespace(name="east", staying=lambda _identity: {"east"})
    fakes: Any = None, names, follower, membership, 1
    draining = Draining(*fakes)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(draining.change, "", "")
        while not names.num_counts:
            await trio.lowlevel.checkpoint()
        for _ in range(100):
            nursery.start_soon(draining.change, "", "")
    assert names.num_counts == 2, "the first one, and one for all that came during it"
    assert draining.holdings == {"east": Holding(versions=NUM_FILES, alone=NUM_FILES, stuck=NUM_FILES)}
    await draining.count("east")
    assert draining.info(has_paths=True)["holdings"]["east"]["paths"][0] == "/fleet/0.kv"
    assert draining.info(has_paths=False)["holdings"]["east"]["paths"] == []
