"""Texts written into contexts: the control tree over a real scheduler, a real decoder and a tokenizer of bytes."""

import errno
import os
import signal
import subprocess
from contextlib import contextmanager

import pytest
import trio
import trio.testing

from kvfs.control import text_writer
from kvfs.control.directory import ControlTree
from kvfs.control.text_writer import is_killed
from kvfs.names.tree import ROOT_NUMBER, Credentials
from libsym.errors import Busy, Exists, Invalid, NoSpace, NotFound, NotPermitted, NotSupported, StepFailed, SymError
from scheduler.status.facts import Control
from scheduler.status.held import HeldTimes
from tests.scheduler.bench import ME, NUM_PAGES, Bench

NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL
ANN = Credentials(1000, 1000)


class Texts(Bench):
    """A bench whose files have their texts under `.symphony`."""

    def __init__(self, tmp_path):
        super().__init__(tmp_path)
        self.tokenizer = self.model.tokenizer
        self.control = ControlTree(
            self.fs, Control(self.fs, self.batches, self.gate, self.programs, self.text, HeldTimes())
        )
        self.texts = self.control.lookup(self.control.lookup(ROOT_NUMBER, b".symphony").number, b"text").number

    async def create(self, name, mode=0o644, flags=NEW):
        return (await self.control.create(self.texts, name, mode, flags, ME, 0))[0]

    async def open(self, name, flags=os.O_RDONLY):
        return await self.control.open(self.control.lookup(self.texts, name).number, flags, ME.uid, 0)

    async def close(self, handle, pid=0):
        """Close a handle as the last close(2) does: FLUSH may raise, and RELEASE follows in any case."""
        try:
            await handle.flush(pid)
        finally:
            await handle.release()

    async def put(self, name, *pieces):
        """Write a whole text, in these pieces."""
        handle = await self.create(name)
        await self.write(handle, *pieces)
        await self.close(handle)

    async def write(self, handle, *pieces, at=0):
        for piece in pieces:
            data = piece if isinstance(piece, bytes) else piece.encode()
            assert await handle.write(at, data) == len(data)
            at += len(data)
        return at

    async def write_and_flush(self, handle, data):
        await handle.write(0, data)
        await handle.flush(0)

    async def read(self, name):
        handle = await self.open(name)
        text = await handle.read(0, 1 << 20)
        await handle.release()
        return text

    def table(self, name):
        return self.fs.volume.tree.root.entries[name].content.table

    def tokens(self, name):
        return self.table(name).read()[0].tolist()

    async def settle(self):
        """Wait until no step works on anything."""
        while self.batches.num_waiting:
            await trio.testing.wait_all_tasks_blocked()

    def leaves_nothing(self):
        assert not self.fs.volume.tree.root.entries
        assert self.fs.pool.num_free == NUM_PAGES
        return True


@pytest.fixture
def bench(tmp_path):
    return Texts(tmp_path)


NASTY = "Grüße,\n<bos>世界 🙂<eo s> <eos><bo <pad>\x00\r\n ende"


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
def test_a_text_has_the_tokens_of_the_whole_however_it_was_written(bench, size):
    data = NASTY.encode()

    async def scenario():
        await bench.put(b"a", *(data[at : at + size] for at in range(0, len(data), size)))
        assert bench.tokens(b"a") == bench.tokenizer.encode(NASTY)
        assert await bench.read(b"a") == data
        assert bench.control.lookup(bench.texts, b"a").size == len(data)

    bench.run(scenario)


def test_a_new_text_is_its_writers_own(bench):
    async def scenario():
        bench.fs.volume.tree.root.mode = 0o777
        handle, attributes = await bench.control.create(bench.texts, b"a", 0o664, NEW, ANN, 0)
        assert (attributes.mode & 0o7777, attributes.uid, attributes.gid) == (0o600, 1000, 1000)
        await bench.close(handle)
        assert bench.fs.kv_stat(ANN, "a").kind == "kv"

    bench.run(scenario)


def test_text_is_computed_while_it_is_being_written(bench):
    async def scenario():
        handle = await bench.create(b"a")
        await bench.write(handle, "some words")
        while bench.table(b"a").length < 10:
            await trio.testing.wait_all_tasks_blocked()
        reader = await bench.open(b"a")
        assert await reader.read(0, 100) == b"some words"
        await bench.write(handle, " more", at=10)
        await handle.flush(0)
        assert await reader.read(10, 100) == b" more"
        await handle.release()
        await reader.release()

    bench.run(scenario)


def test_text_that_follows_a_flush_is_tokenized_with_what_came_before(bench):
    """A shell closes duplicates in the middle: `(cat a; cat b) > text/x`."""

    async def scenario():
        handle = await bench.create(b"a")
        await handle.flush(0)
        end = await bench.write(handle, "one <b")
        await handle.flush(0)
        assert bench.tokens(b"a") == list(b"one <b")
        await bench.write(handle, "os> two", at=end)
        await bench.close(handle)
        assert bench.tokens(b"a") == bench.tokenizer.encode("one <bos> two")

    bench.run(scenario)


def test_a_sync_computes_what_is_whole_and_more_text_may_follow(bench):
    """Editors sync what they have written before they close it."""

    async def scenario():
        handle = await bench.create(b"a")
        await handle.sync()
        end = await bench.write(handle, "one <b")
        await handle.sync()
        assert bench.tokens(b"a") == list(b"one <b")
        end = await bench.write(handle, "os> two 世".encode()[:-1], at=end)
        await handle.sync()
        assert bench.tokens(b"a") == bench.tokenizer.encode("one <bos> two ")
        await bench.write(handle, "世".encode()[-1:], at=end)
        await handle.sync()
        await bench.close(handle)
        assert bench.tokens(b"a") == bench.tokenizer.encode("one <bos> two 世")

    bench.run(scenario)


def test_a_sync_of_a_text_that_has_failed_says_so(bench):
    async def scenario():
        handle = await bench.create(b"a")
        with pytest.raises(Invalid):
            await handle.write(0, b"\xff")
        with pytest.raises(SymError):
            await handle.sync()
        await handle.release()
        assert bench.leaves_nothing()

    bench.run(scenario)


def test_what_a_program_has_appended_since_the_flush_is_not_touched(bench):
    async def scenario():
        handle = await bench.create(b"a")
        end = await bench.write(handle, "one <b")
        await handle.flush(0)
        file = bench.fs.kv_open(ME, "a", write=True)
        await bench.submit(file, [7, 8], rows="none").wait()
        await bench.write(handle, "os>", at=end)
        await bench.close(handle)
        assert bench.tokens(b"a") == [*b"one <b", 7, 8, *b"os>"]
        bench.fs.kv_close(file)

    bench.run(scenario)


@pytest.mark.parametrize("ending", ["more text", "a failure"])
def test_what_a_program_put_in_place_of_the_text_is_not_touched(bench, ending):
    """The file is as long as the writer left it, but the end is not the writer's."""

    async def scenario():
        await bench.put(b"a", "zero ")
        handle = await bench.open(b"a", os.O_WRONLY | os.O_APPEND)
        await bench.write(handle, "one <b")
        await handle.flush(0)
        file = bench.fs.kv_open(ME, "a", write=True)
        bench.fs.kv_truncate(file, 9)
        await bench.submit(file, [7, 8], rows="none").wait()
        if ending == "more text":
            await bench.write(handle, "os>")
            await bench.close(handle)
            assert bench.tokens(b"a") == [*b"zero one ", 7, 8, *b"os>"]
        else:
            with pytest.raises(Invalid):
                await handle.write(0, b"\xff")
            with pytest.raises(SymError):
                await bench.close(handle)
            assert bench.tokens(b"a") == [*b"zero one ", 7, 8]
        bench.fs.kv_close(file)

    bench.run(scenario)


def test_a_write_waits_while_too_much_is_on_its_way(bench, monkeypatch):
    monkeypatch.setattr(text_writer, "MAX_QUEUED_TOKENS", 100)

    async def scenario():
        bench.steps.hold()
        handle = await bench.create(b"a")
        await bench.write(handle, "x" * 150)
        async with trio.open_nursery() as nursery:
            waits = trio.Event()

            async def write():
                await bench.write(handle, "y" * 10, at=150)
                waits.set()

            nursery.start_soon(write)
            await bench.steps.wait_entered()
            assert not waits.is_set()
            bench.steps.gate.set()
        await bench.close(handle)
        assert bench.tokens(b"a") == list(b"x" * 150 + b"y" * 10)

    bench.run(scenario)


async def interrupted(bench, handle, action):
    """Begin `action` while a step is held, and interrupt it there."""
    bench.steps.hold()
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(action)
            await bench.steps.wait_entered()
            scope.cancel()
    assert scope.cancelled_caught
    bench.steps.gate.set()


def test_an_interrupted_write_may_be_repeated(bench, monkeypatch):
    monkeypatch.setattr(text_writer, "MAX_QUEUED_TOKENS", 100)

    async def scenario():
        bench.steps.hold()
        handle = await bench.create(b"a")
        await bench.write(handle, "x" * 150)
        await interrupted(bench, handle, lambda: handle.write(150, b"yyy"))
        assert await handle.write(150, b"yyy") == 3
        await bench.close(handle)
        assert bench.tokens(b"a") == list(b"x" * 150 + b"yyy")

    bench.run(scenario)


def test_an_interrupted_write_that_is_not_repeated_leaves_nothing(bench, monkeypatch):
    monkeypatch.setattr(text_writer, "MAX_QUEUED_TOKENS", 100)

    async def scenario():
        bench.steps.hold()
        handle = await bench.create(b"a")
        await bench.write(handle, "x" * 150)
        await interrupted(bench, handle, lambda: handle.write(150, b"yyy"))
        with pytest.raises(SymError) as caught:
            await bench.close(handle)
        assert caught.value.errno == errno.EINTR
        assert bench.leaves_nothing()

    bench.run(scenario)


def test_a_long_write_that_is_interrupted_says_how_much_it_took(bench, monkeypatch):
    monkeypatch.setattr(text_writer, "MAX_QUEUED_TOKENS", 100)
    monkeypatch.setattr(text_writer, "_PIECE_BYTES", 150)

    async def scenario():
        bench.steps.hold()
        handle = await bench.create(b"a")
        taken = []

        async def write():
            taken.append(await handle.write(0, b"x" * 400))

        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(write)
                await bench.steps.wait_entered()
                scope.cancel()
        assert taken == [150]
        bench.steps.gate.set()
        await bench.write(handle, "y" * 250, at=150)
        await bench.close(handle)
        assert bench.tokens(b"a") == list(b"x" * 150 + b"y" * 250)

    bench.run(scenario)


def test_an_interrupted_close_leaves_nothing(bench):
    async def scenario():
        handle = await bench.create(b"a")
        await bench.write(handle, "x" * 150)
        await interrupted(bench, handle, lambda: handle.flush(0))
        assert not bench.fs.volume.tree.root.entries  # at once, whatever the step is doing
        await handle.release()
        await bench.settle()
        assert bench.leaves_nothing()

    bench.run(scenario)


def test_a_failed_step_fails_the_close_and_leaves_nothing(bench):
    async def scenario():
        bench.steps.failure = RuntimeError("boom")
        handle = await bench.create(b"a")
        await bench.write(handle, "x" * 150)
        with pytest.raises(SymError, match="boom") as caught:
            await handle.flush(0)
        assert caught.value.errno == StepFailed.code
        assert bench.leaves_nothing()
        with pytest.raises(SymError, match="boom"):
            await handle.write(150, b"more")
        await handle.release()

    bench.run(scenario)


def test_a_full_pool_fails_the_write_and_every_page_is_free_again(bench):
    async def scenario():
        handle = await bench.create(b"a")
        await bench.write(handle, "x" * (NUM_PAGES * 32 + 100))
        with pytest.raises(SymError) as caught:
            await bench.close(handle)
        assert caught.value.errno == NoSpace.code
        assert bench.leaves_nothing()

    bench.run(scenario)


def test_what_failed_while_nobody_was_waiting_is_gone_at_once(bench):
    async def scenario():
        handle = await bench.create(b"a")
        await bench.write(handle, "x" * (NUM_PAGES * 32 + 100))
        await bench.settle()
        assert bench.leaves_nothing()
        with pytest.raises(SymError, match="pool"):
            await handle.write(NUM_PAGES * 32 + 100, b"more")
        await handle.release()

    bench.run(scenario)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"good \xff bad", errno.EINVAL),
        (b"cut off \xc3", errno.EINVAL),
        (b"x" * 5000, errno.EFBIG),
        (b"<bos" * 100_000, errno.EFBIG),
    ],
)
def test_what_can_be_no_context_is_refused_and_leaves_nothing(bench, data, code):
    async def scenario():
        handle = await bench.create(b"a")
        with pytest.raises(SymError) as caught:
            await bench.write_and_flush(handle, data)
        assert caught.value.errno == code
        assert not bench.fs.volume.tree.root.entries
        await handle.release()
        assert bench.leaves_nothing()

    bench.run(scenario)


def test_appending_goes_on_after_what_is_there(bench):
    async def scenario():
        await bench.put(b"a", "one")
        handle = await bench.open(b"a", os.O_WRONLY | os.O_APPEND)
        await bench.write(handle, " two", at=999)  # with O_APPEND the kernel's offset is a guess
        await bench.close(handle)
        assert await bench.read(b"a") == b"one two"
        handle = await bench.open(b"a", os.O_WRONLY)
        await bench.write(handle, "!", at=7)
        await bench.close(handle)
        assert await bench.read(b"a") == b"one two!"

    bench.run(scenario)


def test_two_shells_append_to_a_context_that_one_of_them_made(bench):
    """`>> new.kv` in two shells: the first one's offset is a guess as well, once the other has written."""

    async def scenario():
        first = await bench.create(b"a", flags=NEW | os.O_APPEND)
        await bench.write(first, "one")
        await first.flush(0)
        second = await bench.open(b"a", os.O_WRONLY | os.O_APPEND)
        await bench.write(second, " two", at=3)
        await bench.close(second)
        await bench.write(first, " three", at=7)
        await bench.close(first)
        assert await bench.read(b"a") == b"one two three"

    bench.run(scenario)


@pytest.mark.parametrize("at", [0, 2, 4])
def test_a_write_elsewhere_than_at_the_end_is_refused(bench, at):
    async def scenario():
        await bench.put(b"a", "one")
        handle = await bench.open(b"a", os.O_WRONLY)
        with pytest.raises(NotSupported, match="appended"):
            await handle.write(at, b"x")
        await bench.close(handle)
        assert await bench.read(b"a") == b"one"

    bench.run(scenario)


def test_a_failed_append_takes_back_its_own_and_no_more(bench):
    async def scenario():
        await bench.put(b"a", "one")
        handle = await bench.open(b"a", os.O_WRONLY | os.O_APPEND)
        await bench.write(handle, "x" * 600)
        while bench.table(b"a").length < 515:
            await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(Invalid):
            await handle.write(0, b"\xff")
        with pytest.raises(SymError):  # and waits until nothing is left
            await bench.close(handle)
        assert await bench.read(b"a") == b"one"

    bench.run(scenario)


def test_writing_over_a_context_replaces_it_and_programs_keep_theirs(bench):
    async def scenario():
        await bench.put(b"a", "one")
        file = bench.fs.kv_open(ME, "a", write=True)
        handle = await bench.open(b"a", os.O_WRONLY | os.O_TRUNC)
        assert await bench.read(b"a") == b""
        await bench.write(handle, "two!")
        await bench.close(handle)
        assert await bench.read(b"a") == b"two!"
        assert file.table.read()[0].tolist() == list(b"one")
        bench.fs.kv_close(file)

    bench.run(scenario)


@contextmanager
def dying(number):
    """The number of a process that a signal has ended and that nobody has waited for: as the kernel shows one that is
    being ended."""
    process = subprocess.Popen(["sleep", "100"])
    process.send_signal(number)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    yield process.pid
    process.wait()


def test_the_text_of_a_process_that_a_signal_ends_is_gone(bench):
    async def scenario(pid):
        handle = await bench.create(b"a")
        await bench.write(handle, "x" * 50)
        await bench.close(handle, pid)
        await bench.settle()
        assert bench.leaves_nothing()

    with dying(signal.SIGKILL) as pid:
        bench.run(lambda: scenario(pid))


@pytest.mark.parametrize("flags", [NEW, NEW | os.O_APPEND])
def test_a_file_whose_writer_died_before_it_got_a_descriptor_is_gone(bench, flags):
    """The kernel closes what nobody ever got without a FLUSH."""

    async def scenario():
        handle = await bench.create(b"a", flags=flags)
        await handle.release()
        assert bench.leaves_nothing()

    bench.run(scenario)


def test_an_append_whose_writer_died_before_it_got_a_descriptor_changes_nothing(bench):
    async def scenario():
        await bench.put(b"a", "one")
        handle = await bench.open(b"a", os.O_WRONLY | os.O_APPEND)
        await handle.release()
        assert await bench.read(b"a") == b"one"

    bench.run(scenario)


def test_an_empty_text_that_was_closed_stays(bench):
    async def scenario():
        handle = await bench.create(b"a")
        await bench.close(handle, os.getpid())
        assert await bench.read(b"a") == b""

    bench.run(scenario)


def test_one_of_several_writers_may_die_when_another_goes_on(bench):
    async def scenario(pid):
        handle = await bench.create(b"a")
        end = await bench.write(handle, "one ")
        await handle.flush(pid)
        await bench.write(handle, "two", at=end)
        await bench.close(handle, os.getpid())
        assert await bench.read(b"a") == b"one two"

    with dying(signal.SIGINT) as pid:
        bench.run(lambda: scenario(pid))


@pytest.mark.parametrize("has_flushed", [True, False])
def test_a_writer_that_dies_takes_no_finished_text_of_another_with_it(bench, has_flushed):
    async def scenario(pid):
        first = await bench.create(b"a", flags=NEW | os.O_APPEND)
        if has_flushed:
            await first.flush(0)
        second = await bench.open(b"a", os.O_WRONLY | os.O_APPEND)
        await bench.write(second, "hello")
        await bench.close(second)
        await bench.close(first, pid)
        await bench.settle()
        assert await bench.read(b"a") == b"hello"

    with dying(signal.SIGKILL) as pid:
        bench.run(lambda: scenario(pid))


def test_a_writer_that_dies_leaves_the_file_to_another_that_has_it_open(bench):
    """The first one's text is being computed when it dies; the second has written nothing yet."""

    async def scenario(pid):
        first = await bench.create(b"a", flags=NEW | os.O_APPEND)
        await bench.write(first, "x" * 50)
        second = await bench.open(b"a", os.O_WRONLY | os.O_APPEND)
        await bench.close(first, pid)
        await bench.write(second, "hello")
        await bench.close(second)
        assert await bench.read(b"a") == b"hello"

    with dying(signal.SIGKILL) as pid:
        bench.run(lambda: scenario(pid))


@pytest.mark.parametrize(("command", "killed"), [("kill -9 $$", True), ("kill -15 $$", True), ("exit 9", False)])
def test_only_a_signal_counts_as_killed(command, killed):
    process = subprocess.Popen(["sh", "-c", command])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert is_killed(process.pid) == killed
    process.wait()
    assert not is_killed(process.pid)
    assert not is_killed(os.getpid())


def test_an_unmount_in_the_middle_leaves_nothing_behind(bench):
    async def scenario():
        bench.steps.hold()
        handle = await bench.create(b"a")
        await bench.write(handle, "x" * 150)
        reader = await bench.open(b"a")
        await bench.steps.wait_entered()
        bench.control.close()
        bench.steps.gate.set()
        await bench.settle()
        bench.fs.kv_remove(ME, "a")
        assert bench.leaves_nothing()
        del reader

    bench.run(scenario)


def test_names_in_the_text_view_are_those_of_kv_files_and_directories(bench):
    async def scenario():
        tree = bench.fs.volume.tree
        bench.fs.volume.make_plain(tree.root, b"plain", 0o644, 0, 0)
        directory = tree.make(tree.root, b"docs", 0o040000, mode=0o750, uid=5, gid=6)
        await bench.put(b"a", "one")
        assert {name for _, name, _ in bench.control.listing(bench.texts, 0, 99)} == {b"a", b"docs"}
        mirrored = bench.control.lookup(bench.texts, b"docs")
        assert (mirrored.mode, mirrored.uid, mirrored.gid) == (0o040750, 5, 6)
        assert bench.control.lookup(mirrored.number, b"..").number == bench.texts
        with pytest.raises(NotFound):
            bench.control.lookup(bench.texts, b"plain")
        with pytest.raises(Exists, match="no KV file"):
            await bench.control.create(bench.texts, b"plain", 0o600, os.O_WRONLY | os.O_CREAT, ME, 0)
        tree.rmdir(tree.root, b"docs")
        assert directory.number  # its control file has gone with it
        with pytest.raises(NotFound):
            bench.control.attributes(mirrored.number)

    bench.run(scenario)


def test_the_control_files_themselves_cant_be_changed(bench):
    async def scenario():
        root = bench.control.lookup(ROOT_NUMBER, b".symphony")
        model = bench.control.lookup(root.number, b"model")
        with pytest.raises(NotPermitted):
            await bench.control.open(model.number, os.O_WRONLY, ME.uid, 0)
        with pytest.raises(NotPermitted):
            await bench.control.create(root.number, b"x", 0o600, NEW, ME, 0)
        with pytest.raises(NotPermitted):
            bench.control.truncate(model.number, 0)
        for name in (".symphony", ".symphony/"):
            with pytest.raises((NotPermitted, SymError)):
                bench.fs.kv_create(ME, name)
        with pytest.raises(NotFound):
            bench.fs.kv_open(ME, ".symphony/text/a", write=False)

    bench.run(scenario)


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        (b".a.swp", os.O_RDWR | os.O_CREAT | os.O_EXCL),
        (b"sedAbCdEf", os.O_RDWR | os.O_CREAT | os.O_EXCL),
        (b"4913", NEW | os.O_NOFOLLOW),
        (b"a~", NEW),
        (b"#a#", os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
    ],
)
def test_what_an_editor_makes_for_itself_is_refused_at_once(bench, name, flags):
    async def scenario():
        with pytest.raises(NotPermitted, match="O_WRONLY"):
            await bench.create(name, flags=flags)
        assert bench.leaves_nothing()

    bench.run(scenario)


def test_a_text_can_be_truncated_to_whole_entries(bench):
    async def scenario():
        await bench.put(b"a", "abc<bos>def")
        number = bench.control.lookup(bench.texts, b"a").number
        bench.control.truncate(number, 6)  # in the middle of <bos>
        assert await bench.read(b"a") == b"abc"
        with pytest.raises(NotSupported):
            bench.control.truncate(number, 4)
        bench.control.truncate(number, 0)
        assert await bench.read(b"a") == b""
        assert bench.fs.kv_stat(ME, "a").kind == "kv"

    bench.run(scenario)


def test_a_text_that_is_being_written_cant_be_truncated(bench):
    async def scenario():
        handle = await bench.create(b"a")
        number = bench.control.lookup(bench.texts, b"a").number
        bench.control.truncate(number, 0)  # as `truncate(1)` does: it has the file open for writing, too
        await bench.write(handle, "one")
        with pytest.raises(Busy, match="being written"):
            bench.control.truncate(number, 0)
        await bench.close(handle)
        assert await bench.read(b"a") == b"one"

    bench.run(scenario)


def test_a_file_that_is_no_kv_file_any_more_has_no_text(bench):
    async def scenario():
        await bench.put(b"a", "one")
        number = bench.control.lookup(bench.texts, b"a").number
        reader = await bench.open(b"a")
        bench.fs.volume.truncate(bench.fs.volume.tree.root.entries[b"a"], 0)  # through its image: a plain file now
        assert await reader.read(0, 10) == b""
        with pytest.raises(SymError) as caught:
            await bench.control.open(number, os.O_RDONLY, ME.uid, 0)
        assert caught.value.errno == errno.ESTALE
        with pytest.raises(NotFound):
            bench.control.lookup(bench.texts, b"a")
        await reader.release()

    bench.run(scenario)
