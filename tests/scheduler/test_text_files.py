"""Texts written into contexts: the control tree over a real scheduler, a real decoder and a tokenizer of bytes."""

import errno
import os
import subprocess
from typing import Any

import pytest
import trio
import trio.testing

from kvfs.control import text_writer
from kvfs.control.directory import CONTROL_ROOT, ControlTree
from kvfs.control.text_writer import is_killed
from kvfs.names.tree import ROOT_NUMBER, Credentials
from libsym.errors import Busy, Exists, Invalid, NoSpace, NotFound, NotPermitted, NotSupported, StepFailed, SymError
from scheduler.status.facts import Control
from scheduler.status.held import HeldTimes
from tests.scheduler.bench import ME, NUM_PAGES, Bench

NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL
APPEND, REPLACE = os.O_WRONLY | os.O_APPEND, os.O_WRONLY | os.O_TRUNC


class Writer:
    """An open file, and the offset of its program."""

    def __init__(self, handle):
        self.handle, self.at = handle, 0

    async def write(self, *pieces):
        for piece in pieces:
            data = piece if isinstance(piece, bytes) else piece.encode()
            assert await self.handle.write(self.at, data) == len(data)
            self.at += len(data)

    async def flush(self, pid=0):
        await self.handle.flush(pid)

    async def sync(self):
        await self.handle.sync()

    async def release(self):
        await self.handle.release()

    async def close(self, pid=0):
        """Close the file as the last close(2) does: FLUSH may raise, and RELEASE follows in any case."""
        try:
            await self.flush(pid)
        finally:
            await self.release()

    async def fails(self, data=b"\xff"):
        """Fail by what is no text."""
        with pytest.raises(Invalid):
            await self.handle.write(self.at, data)


class Texts(Bench):
    """A bench whose files have their texts under `.symphony`. Tests write the text of a file named `a`."""

    def __init__(self, tmp_path):
        super().__init__(tmp_path)
        self.encode = self.model.tokenizer.encode
        sources = Control(self.fs, self.batches, self.gate, self.programs, self.text, HeldTimes())
        self.control = ControlTree(self.fs, sources)
        self.texts = self.control.lookup(self.control.lookup(ROOT_NUMBER, b".symphony").number, b"text").number

    async def create(self, name=b"a", flags=NEW):
        return Writer((await self.control.create(self.texts, name, 0o644, flags, ME, 0))[0])

    @property
    def number(self):
        return self.control.lookup(self.texts, b"a").number

    async def open(self, flags=os.O_RDONLY, at=0):
        writer = Writer(await self.control.open(self.number, flags, ME.uid, 0))
        writer.at = at
        return writer

    async def put(self, *pieces):
        """Write a whole text, in these pieces."""
        writer = await self.create()
        await writer.write(*pieces)
        await writer.close()

    async def read(self):
        reader = await self.open()
        text = await reader.handle.read(0, 1 << 20)
        await reader.release()
        return text.decode()

    @property
    def table(self):
        content: Any = self.tree.root.entries[b"a"].content
        return content.table

    @property
    def tokens(self):
        return self.table.read()[0].tolist()

    async def computed(self, num_entries):
        while self.table.length < num_entries:
            await trio.testing.wait_all_tasks_blocked()

    async def settle(self):
        """Wait until no step works on anything."""
        while self.batches.num_waiting:
            await trio.testing.wait_all_tasks_blocked()

    def leaves_nothing(self):
        assert not self.tree.root.entries
        assert self.fs.pool.num_free == NUM_PAGES
        return True

    async def interrupted(self, action):
        """Begin `action` while a step is held, and interrupt it there."""
        self.steps.hold()
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(action)
                await self.steps.wait_entered()
                scope.cancel()
        self.steps.gate.set()
        return scope.cancelled_caught


@pytest.fixture
def bench(tmp_path):
    return Texts(tmp_path)


# ---- the tokens of a text


NASTY = "Grüße,\n<bos>世界 🙂<eo s> <eos><bo <pad>\x00\r\n ende"


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
async def test_a_text_has_the_tokens_of_the_whole_however_it_was_written(bench, size):
    data = NASTY.encode()
    await bench.put(*(data[at : at + size] for at in range(0, len(data), size)))
    assert bench.tokens == bench.encode(NASTY)
    assert await bench.read() == NASTY
    assert bench.control.lookup(bench.texts, b"a").size == len(data)


async def test_a_new_text_is_its_writers_own(bench):
    bench.tree.root.mode, ann = 0o777, Credentials(1000, 1000)
    handle, attributes = await bench.control.create(bench.texts, b"a", 0o664, NEW, ann, 0)
    assert (attributes.mode & 0o7777, attributes.uid, attributes.gid) == (0o600, 1000, 1000)
    await Writer(handle).close()
    assert bench.fs.kv_stat(ann, "a").kind == "kv"


@pytest.mark.parametrize(("end", "cut"), [(Writer.sync, 1), (Writer.flush, 3)])
async def test_a_sync_or_a_flush_computes_what_is_whole_and_more_text_may_follow(bench, end, cut):
    """Editors sync what they write before they close it. A shell closes duplicates: `(cat a; cat b) > text/x`."""
    writer, world, two = await bench.create(), "世".encode(), bench.encode("one <bos> two ")
    await end(writer)
    pieces = ((b"one <b", list(b"one <b")), (b"os> two " + world[:-cut], two), (world[-cut:], [*two, *world]))
    for piece, tokens in pieces:
        await writer.write(piece)
        await end(writer)
        assert bench.tokens == tokens
    await writer.close()
    assert bench.tokens == bench.encode("one <bos> two 世")


@pytest.mark.parametrize("has_more", [True, False])
async def test_what_a_program_put_in_place_of_the_text_is_not_touched(bench, has_more):
    """The file is as long as the writer left it, but the end is not the writer's."""
    await bench.put("zero ")
    writer = await bench.open(APPEND)
    await writer.write("one <b")
    await writer.flush()
    file = bench.fs.kv_open(ME, "a", write=True)
    bench.fs.kv_truncate(file, 9)
    await bench.submit(file, [7, 8], rows="none").wait()
    if has_more:
        await writer.write("os>")
        await writer.close()
    else:
        await writer.fails()
        with pytest.raises(SymError):
            await writer.close()
    assert bench.tokens == [*b"zero one ", 7, 8, *(b"os>" if has_more else b"")]
    bench.fs.kv_close(file)


async def test_two_shells_append_to_a_context_that_one_of_them_made(bench):
    """`>> new.kv` in two shells: the first one's offset is a guess as well, once the other has written."""
    first = await bench.create(flags=NEW | os.O_APPEND)
    await first.write("one")
    await first.flush()
    second = await bench.open(APPEND, at=3)
    await second.write(" two")
    await second.close()
    first.at = 7
    await first.write(" three")
    await first.close()
    assert await bench.read() == "one two three"


async def test_a_write_elsewhere_than_at_the_end_is_refused(bench):
    await bench.put("one")
    writer = await bench.open(os.O_WRONLY)
    for at in (0, 2, 4):
        with pytest.raises(NotSupported, match="appended"):
            await writer.handle.write(at, b"x")
    await writer.close()
    assert await bench.read() == "one"


async def test_writing_over_a_context_replaces_it_and_programs_keep_theirs(bench):
    await bench.put("one")
    file = bench.fs.kv_open(ME, "a", write=True)
    writer = await bench.open(REPLACE)
    assert await bench.read() == ""
    await writer.write("two!")
    await writer.close()
    assert await bench.read() == "two!"
    assert file.table.read()[0].tolist() == list(b"one")
    bench.fs.kv_close(file)


# ---- writes that wait, and are interrupted


@pytest.fixture
def short_queue(monkeypatch):
    monkeypatch.setattr(text_writer, "MAX_QUEUED_TOKENS", 100)


async def waiting_writer(bench):
    """A writer whose next write waits."""
    bench.steps.hold()
    writer = await bench.create()
    await writer.write("x" * 150)
    return writer


async def test_a_write_waits_while_too_much_is_on_its_way(bench, short_queue):
    writer, is_through = await waiting_writer(bench), trio.Event()

    async def write():
        await writer.write("y" * 10)
        is_through.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        await bench.steps.wait_entered()
        assert not is_through.is_set()
        bench.steps.gate.set()
    await writer.close()
    assert bench.tokens == list(b"x" * 150 + b"y" * 10)


@pytest.mark.parametrize("is_repeated", [True, False])
async def test_an_interrupted_write_may_be_repeated_and_else_leaves_nothing(bench, short_queue, is_repeated):
    writer = await waiting_writer(bench)
    assert await bench.interrupted(lambda: writer.write("yyy"))
    if is_repeated:
        await writer.write("yyy")
        await writer.close()
        assert bench.tokens == list(b"x" * 150 + b"yyy")
    else:
        with pytest.raises(SymError) as caught:
            await writer.close()
        assert caught.value.errno == errno.EINTR
        assert bench.leaves_nothing()


async def test_a_long_write_that_is_interrupted_says_how_much_it_took(bench, short_queue, monkeypatch):
    monkeypatch.setattr(text_writer, "_PIECE_BYTES", 150)
    writer, taken = await bench.create(), []

    async def write():
        taken.append(await writer.handle.write(0, b"x" * 400))

    await bench.interrupted(write)
    assert taken == [150]
    writer.at = 150
    await writer.write("y" * 250)
    await writer.close()
    assert bench.tokens == list(b"x" * 150 + b"y" * 250)


async def test_an_interrupted_close_leaves_nothing(bench):
    writer, found = await bench.create(), []
    await writer.write("x" * 150)

    async def flush():
        try:
            await writer.flush()
        finally:
            found.extend(bench.tree.root.entries)

    assert await bench.interrupted(flush)
    assert not found, "at once, whatever the step is doing"
    await writer.release()
    await bench.settle()
    assert bench.leaves_nothing()


# ---- texts that fail


async def test_a_failed_step_fails_the_close_and_leaves_nothing(bench):
    bench.steps.failure = RuntimeError("boom")
    writer = await bench.create()
    await writer.write("x" * 150)
    with pytest.raises(SymError, match="boom") as caught:
        await writer.flush()
    assert caught.value.errno == StepFailed.code
    assert bench.leaves_nothing()
    with pytest.raises(SymError, match="boom"):
        await writer.write("more")
    await writer.release()


@pytest.mark.parametrize("waits", [True, False])
async def test_a_full_pool_fails_the_text_at_once_and_every_page_is_free_again(bench, waits):
    writer = await bench.create()
    await writer.write("x" * (NUM_PAGES * 32 + 100))
    if waits:
        with pytest.raises(SymError) as caught:
            await writer.flush()
        assert caught.value.errno == NoSpace.code
    else:
        await bench.settle()
    assert bench.leaves_nothing()
    with pytest.raises(SymError, match="pool"):
        await writer.write("more")
    await writer.release()


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"good \xff bad", errno.EINVAL),
        (b"cut off \xc3", errno.EINVAL),
        (b"x" * 5000, errno.EFBIG),
        (b"<bos" * 100_000, errno.EFBIG),
    ],
)
async def test_what_can_be_no_context_is_refused_and_leaves_nothing(bench, data, code):
    async def write_and_flush():
        await writer.write(data)
        await writer.flush()

    writer = await bench.create()
    with pytest.raises(SymError) as caught:
        await write_and_flush()
    assert caught.value.errno == code
    assert not bench.tree.root.entries
    with pytest.raises(SymError):
        await writer.sync()
    await writer.release()
    assert bench.leaves_nothing()


async def test_a_failed_append_takes_back_its_own_and_no_more(bench):
    await bench.put("one")
    writer = await bench.open(APPEND)
    await writer.write("x" * 600)
    await bench.computed(515)
    await writer.fails()
    with pytest.raises(SymError):  # and waits until nothing is left
        await writer.close()
    assert await bench.read() == "one"


# ---- writers that die


@pytest.fixture
def dying():
    """Makes numbers of processes that have ended and that nobody has waited for: as the kernel shows one that a signal
    is ending."""
    started = []

    def make(command):
        started.append(subprocess.Popen(["sh", "-c", command]))
        os.waitid(os.P_PID, started[-1].pid, os.WEXITED | os.WNOWAIT)
        return started[-1].pid

    yield make
    for process in started:
        process.wait()
        assert not is_killed(process.pid)


def test_only_a_signal_counts_as_killed(dying):
    assert [is_killed(dying(command)) for command in ("kill -9 $$", "kill -15 $$", "exit 9")] == [True, True, False]
    assert not is_killed(os.getpid())


async def test_the_text_of_a_writer_that_dies_is_gone_also_before_it_got_a_descriptor(bench, dying):
    writer = await bench.create()
    await writer.write("x" * 50)
    await writer.close(dying("kill -9 $$"))
    await bench.settle()
    assert bench.leaves_nothing()
    for flags in (NEW, NEW | os.O_APPEND):
        await (await bench.create(flags=flags)).release()  # the kernel closes what nobody ever got without a FLUSH
        assert bench.leaves_nothing()
    await (await bench.create()).close(os.getpid())
    assert await bench.read() == "", "an empty text that was closed stays"
    writer = await bench.open(APPEND)
    await writer.write("one")
    await writer.close()
    await (await bench.open(APPEND)).release()
    assert await bench.read() == "one", "an append that never began changes nothing"


async def test_one_of_several_writers_may_die_when_another_goes_on(bench, dying):
    writer = await bench.create()
    await writer.write("one ")
    await writer.flush(dying("kill -2 $$"))
    await writer.write("two")
    await writer.close(os.getpid())
    assert await bench.read() == "one two"


@pytest.mark.parametrize("begun", ["opened", "flushed", "written"])
async def test_a_writer_that_dies_leaves_the_text_of_another(bench, dying, begun):
    """The other one has finished; or, while the text of the first is being computed, has written nothing yet."""
    first = await bench.create(flags=NEW | os.O_APPEND)
    if begun == "flushed":
        await first.flush()
    elif begun == "written":
        await first.write("x" * 50)
    second = await bench.open(APPEND)
    if begun == "written":
        await first.close(dying("kill -9 $$"))
    await second.write("hello")
    await second.close()
    if begun != "written":
        await first.close(dying("kill -9 $$"))
        await bench.settle()
    assert await bench.read() == "hello"


async def test_an_unmount_in_the_middle_leaves_nothing_behind(bench):
    bench.steps.hold()
    writer = await bench.create()
    await writer.write("x" * 150)
    reader = await bench.open()
    await bench.steps.wait_entered()
    bench.control.close()
    bench.steps.gate.set()
    await bench.settle()
    bench.fs.kv_remove(ME, "a")
    assert bench.leaves_nothing()
    del reader


# ---- the view


async def test_names_in_the_text_view_are_those_of_kv_files_and_directories(bench):
    tree, control = bench.tree, bench.control
    bench.fs.volume.make_plain(tree.root, b"plain", 0o644, 0, 0)
    directory = tree.make(tree.root, b"docs", 0o040000, mode=0o750, uid=5, gid=6)
    await bench.put("one")
    assert {name for _, name, _ in control.listing(bench.texts, 0, 99)} == {b"a", b"docs"}
    mirrored = control.lookup(bench.texts, b"docs")
    assert (mirrored.mode, mirrored.uid, mirrored.gid) == (0o040750, 5, 6)
    assert control.lookup(mirrored.number, b"..").number == bench.texts
    assert control.lookup(bench.texts, b"..").number == CONTROL_ROOT
    with pytest.raises(NotFound):
        control.lookup(bench.texts, b"plain")
    with pytest.raises(Exists, match="no KV file"):
        await control.create(bench.texts, b"plain", 0o600, os.O_WRONLY | os.O_CREAT, ME, 0)
    tree.rmdir(tree.root, b"docs")
    assert directory.number  # its control file has gone with it
    with pytest.raises(NotFound):
        control.attributes(mirrored.number)


async def test_the_control_files_themselves_cant_be_changed(bench):
    control, root = bench.control, bench.control.lookup(ROOT_NUMBER, b".symphony")
    model = control.lookup(root.number, b"model")
    with pytest.raises(NotPermitted):
        await control.open(model.number, os.O_WRONLY, ME.uid, 0)
    with pytest.raises(NotPermitted):
        await control.create(root.number, b"x", 0o600, NEW, ME, 0)
    with pytest.raises(NotPermitted):
        control.truncate(model.number, 0)
    for name in (".symphony", ".symphony/"):
        with pytest.raises((NotPermitted, SymError)):
            bench.fs.kv_create(ME, name)
    with pytest.raises(NotFound):
        bench.fs.kv_open(ME, ".symphony/text/a", write=False)


async def test_what_an_editor_makes_for_itself_is_refused_at_once(bench):
    swap, new = os.O_RDWR | os.O_CREAT | os.O_EXCL, os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    made = ((b".a.swp", swap), (b"sedAbCdEf", swap), (b"4913", NEW | os.O_NOFOLLOW), (b"a~", NEW), (b"#a#", new))
    for name, flags in made:
        with pytest.raises(NotPermitted, match="O_WRONLY"):
            await bench.create(name, flags)
        assert bench.leaves_nothing()


async def test_a_text_can_be_truncated_to_whole_entries_unless_it_is_being_written(bench):
    await bench.put("abc<bos>def")
    bench.control.truncate(bench.number, 6)  # in the middle of <bos>
    assert await bench.read() == "abc"
    with pytest.raises(NotSupported):
        bench.control.truncate(bench.number, 4)
    writer = await bench.open(APPEND)
    bench.control.truncate(bench.number, 0)  # as `truncate(1)` does: it has the file open for writing, too
    assert await bench.read() == ""
    assert bench.fs.kv_stat(ME, "a").kind == "kv"
    await writer.write("one")
    with pytest.raises(Busy, match="being written"):
        bench.control.truncate(bench.number, 0)
    await writer.close()
    assert await bench.read() == "one"


async def test_a_file_that_is_no_kv_file_any_more_has_no_text(bench):
    await bench.put("one")
    number, reader = bench.number, (await bench.open()).handle
    bench.fs.volume.truncate(bench.tree.root.entries[b"a"], 0)  # through its image: a plain file now
    assert await reader.read(0, 10) == b""
    with pytest.raises(SymError) as caught:
        await bench.control.open(number, os.O_RDONLY, ME.uid, 0)
    assert caught.value.errno == errno.ESTALE
    with pytest.raises(NotFound):
        bench.control.lookup(bench.texts, b"a")
    await reader.release()
