"""Dependencies of names, as the journal finds them."""

from kvfs.durable.journal import Journal
from kvfs.names.tree import RENAME_EXCHANGE
from tests.kvfs.durable.house import ROOT, House, plain_of, running


def settle(journal: Journal) -> None:
    while journal.settle():
        pass


async def test_operations_of_a_commit_that_failed_are_found_again_in_their_order(tmp_path):
    async with running(House(tmp_path)) as house:
        journal = house.keeper._journal
        for name in ("a", "a/b"):
            house.fs.kv_mkdir(ROOT, name, 0o700)
        house.create("a/b/file.kv", [1])
        house.create("other.kv")
        file = house.fs.find(ROOT, "a/b/file.kv")
        before = journal.closure([file])
        assert [change.puts[0].key[1] for change in before] == [b"a", b"b", b"file.kv"]
        all_of_them = list(journal.operations.values())
        journal.give_back(before[:2], journal.take(before[:2], []))
        assert journal.closure([file]) == before
        assert list(journal.operations.values()) == all_of_them


async def test_a_directory_that_is_gone_depends_on_the_removals_of_the_names_in_it(tmp_path):
    async with running(House(tmp_path)) as house:
        journal = house.keeper._journal
        house.fs.kv_mkdir(ROOT, "a", 0o700)
        house.create("a/b.kv", [1])
        journal.take(list(journal.operations.values()), [])
        house.fs.kv_remove(ROOT, "a/b.kv")
        house.tree.rmdir(house.tree.root, b"a")
        assert [change.puts[0].key[1] for change in journal.closure([house.tree.root])] == [b"b.kv", b"a"]


async def test_a_sync_waits_for_the_new_name_of_a_directory_that_its_file_has_left_only_in_memory(tmp_path):
    async with running(House(tmp_path)) as house:
        journal, file = house.keeper._journal, house.create("far.kv").inode
        house.fs.kv_mkdir(ROOT, "old", 0o700)
        house.fs.kv_rename(ROOT, "far.kv", "old/file.kv")
        journal.take(list(journal.operations.values()), journal.dirty.copy())
        house.fs.kv_rename(ROOT, "old", "new")
        number = journal.number
        house.fs.kv_rename(ROOT, "new/file.kv", "file.kv")
        assert journal.concerns(file, number), "a crash would leave old/file.kv"
        assert journal.closure([file]) == [*journal.operations.values()]


async def test_a_file_that_is_gone_leaves_the_journal_and_a_sync_waits_for_what_took_its_name(tmp_path):
    async with running(House(tmp_path)) as house:
        journal, root = house.keeper._journal, house.tree.root
        house.create("x.kv", [1])
        number = journal.number
        house.create("gone.kv", [2])
        house.fs.kv_remove(ROOT, "gone.kv")
        house.create("y.kv", [3])
        house.fs.kv_rename(ROOT, "y.kv", "x.kv")
        settle(journal)
        made, renamed = journal.operations.values()
        assert [put.key[1] for put in (*made.puts, *renamed.puts)] == [b"y.kv", b"x.kv", b"y.kv"]
        journal.take([made], [root])
        assert renamed.number > number
        assert journal.concerns(root, number)
        journal.take([renamed], [])
        assert not journal.concerns(root, number)
        journal.give_back([made, renamed], {})


async def test_a_file_that_got_its_name_back_from_one_that_is_gone_leaves_the_journal_as_well(tmp_path):
    async with running(House(tmp_path)) as house:
        journal = house.keeper._journal
        one = house.create("a.kv", [1]).inode
        house.tree.link(one, house.tree.root, b"c.kv")
        house.create("b.kv", [2])
        house.fs.kv_rename(ROOT, "b.kv", "a.kv")
        house.fs.kv_rename(ROOT, "c.kv", "a.kv")
        settle(journal)
        house.fs.kv_remove(ROOT, "a.kv")
        settle(journal)
        assert not journal.operations


async def test_of_two_exchanged_files_that_are_gone_the_first_leaves_the_others_name_as_it_was(tmp_path):
    async with running(House(tmp_path)) as house:
        journal, root = house.keeper._journal, house.tree.root
        one = house.create("e.kv", [1]).inode
        house.create("g.kv", [2])
        journal.take(list(journal.operations.values()), [])
        house.tree.rename(root, b"e.kv", root, b"g.kv", RENAME_EXCHANGE)
        house.create("b.kv", [3])
        house.fs.kv_rename(ROOT, "b.kv", "g.kv")
        settle(journal)
        house.fs.kv_remove(ROOT, "e.kv")
        settle(journal)
        puts = {put.key[1]: put for change in journal.operations.values() for put in change.puts}
        assert (puts[b"e.kv"].before, puts[b"e.kv"].after) == (one, None)


async def test_a_file_that_went_while_a_commit_had_its_name_leaves_the_journal_when_that_has_failed(tmp_path):
    async with running(House(tmp_path)) as house:
        journal = house.keeper._journal
        house.create("a.kv")
        committed = list(journal.operations.values())
        dirty = journal.take(committed, journal.dirty.copy())
        house.fs.kv_remove(ROOT, "a.kv")
        settle(journal)
        journal.give_back(committed, dirty)
        settle(journal)
        assert not journal.operations


async def test_operations_that_overtake_a_file_that_can_not_be_written_wait_for_the_first_sync_of_another(tmp_path):
    async with running(House(tmp_path)) as house:
        journal, cutter = house.keeper._journal, house.keeper._cutter

        def taken() -> list[bytes]:
            return [put.key[1] for change in journal.apart(cutter.is_ready, 9) for put in change.puts]

        house.create("kv", range(40))
        house.fs.kv_rename(ROOT, "kv", "unready")
        house.make_plain("first")
        note = house.make_plain("note", b"small")
        house.make_plain("last")
        assert taken() == [b"kv", b"first"]
        assert taken() == []
        assert cutter.unready(journal.first_operations()) == [note.content]
        plain_of(note).sync()
        assert taken() == [b"note", b"last"]
        house.write(house.make_plain("refused"), b"small")
        journal.left_out[house.fs.find(ROOT, "refused")] = "an error"
        house.make_plain("after")
        assert taken()[-1] == b"after", "a file that is left out has no sync that an operation could wait for"
