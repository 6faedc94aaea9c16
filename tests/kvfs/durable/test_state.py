"""States that a daemon opens or refuses, and the files in them."""

import os
from pathlib import Path

import pytest

from kvfs.durable.state import State
from kvfs.names.content import KvFile
from libsym.errors import Invalid
from tests.kvfs.durable.house import House, running
from tests.kvfs.fakes import FakeFacts, fake_identity


async def test_a_file_of_another_model_is_not_opened_for_its_text_to_be_written(tmp_path):
    async with running(House(tmp_path), drain=True) as house:
        house.create("a.kv", range(40))
        house.create("empty.kv")
    async with running(House(tmp_path, FakeFacts(identity=fake_identity("another")))) as house:
        for inode in house.tree:
            if isinstance(inode.content, KvFile):
                with pytest.raises(Invalid, match="model"):
                    house.fs.kv_open_inode(inode, write=True)


def test_commits_that_were_read_are_on_disk(tmp_path, monkeypatch):
    state = State(tmp_path)  # not closed: its log is as a daemon leaves it that is killed
    synced: list[str] = []
    fsync = os.fsync

    def noted(number: int) -> None:
        synced.append(Path(f"/proc/self/fd/{number}").readlink().name)
        fsync(number)

    monkeypatch.setattr(os, "fsync", noted)
    copy = tmp_path / "copy"
    copy.mkdir()
    for each in tmp_path.glob("index.db*"):
        (copy / each.name).write_bytes(each.read_bytes())
    State(copy).close()
    assert "index.db-wal" in synced
    state.close()


def test_a_directory_of_other_things_is_no_state(tmp_path):
    (tmp_path / "mine").write_text("data")
    tmp_path.chmod(0o755)
    with pytest.raises(Invalid, match="choose another --state"):
        State(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    assert [each.name for each in tmp_path.iterdir()] == ["mine"]


def test_the_root_of_a_file_system_may_be_a_state(tmp_path):
    (tmp_path / "lost+found").mkdir()
    State(tmp_path).close()
    (tmp_path / "mine").write_text("data")
    State(tmp_path).close()
