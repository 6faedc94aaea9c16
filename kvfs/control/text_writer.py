"""Writing text into a context: `cat handbook.md > /kv/.symphony/text/handbook.kv`.

The text is tokenized and computed while it is being written. What it becomes does not depend on how the writes were
cut: only what tokenizes the same whatever follows goes on its way at once. A FLUSH (a descriptor was closed: there may
be more of them) and an FSYNC tokenize the rest as well; should more text follow, that rest is taken back and tokenized
again together with it.

It is all or nothing: when the pool is full, a step fails, the text is too long or no UTF-8, or the writer dies by a
signal, then everything that was written through this handle goes away, and with it the file if the handle made it. (The
file stays if there is more in it, or if others have it open, perhaps to write.)
A writer that dies between two writes shows only in the way it exits: so the FLUSH of a process that a signal is killing
counts as an interruption, if it is the last one. A RELEASE without any FLUSH is one, too: the writer died while it was
opening the file, and never had a descriptor to close. So is a write that was interrupted and never repeated: it leaves
a hole in the text.
"""

from __future__ import annotations

import codecs
import errno
import logging
from pathlib import Path

import trio

from kvfs.control.sources import ControlFiles
from kvfs.fs import FileSystem, OpenKv
from kvfs.names.inode import Credentials
from kvfs.pages.holdings import Holdings, Kind
from libsym.errors import Invalid, OverQuota, SymError

log = logging.getLogger(__name__)

MAX_QUEUED_TOKENS = 4096
"""A write waits while more than this is on its way: eight full steps, so the decoder never runs dry."""

_PIECE_BYTES = 16 << 10
"""A long write is taken in pieces, so that it can wait, and be interrupted, in between."""

_INLINE_CHARS = 2048
"""Texts up to here are tokenized at once (0.2 ms), longer ones in a worker."""

_CHAR_BYTES = 4
"""Of a character in memory, at most."""

_SHRINKAGE = 4
"""A text may be that much longer than its tokens' texts together: composing it (NFC) takes bytes away."""

_NAME_AND_WRITER = 2
"""Users of a file's content when nobody else has it open."""

_ROOT = Credentials(0, 0)


class TextWriter:
    """Text that an open file description writes to the end of a KV file."""

    def __init__(
        self, fs: FileSystem, files: ControlFiles, handle: OpenKv, holdings: Holdings, *, is_new: bool, pid: int
    ) -> None:
        """Takes over `handle`. `is_new`: it was made for this writer, and goes with it when that fails.

        `holdings`: of the user who writes, with room for a text.
        """
        self._holdings = holdings
        holdings.charge(Kind.TEXT)
        self._held_bytes = 0
        """Of pending text, beyond the weight of a text."""
        self._fs = fs
        self._files = files
        self._handle = handle
        self._is_new = is_new
        self._prefill = files.prefill(handle, pid, self._fail)
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._pending = ""
        """Text that is not tokenized yet, because what follows may change its tokens."""
        self._rest: tuple[str, int] | None = None
        """Text that the last FLUSH or FSYNC tokenized all the same, and how many tokens it gave."""
        self._first = handle.table.length
        self._cuts = handle.content.cuts
        self._num_tokens = 0
        self.has_begun = False
        self.num_bytes = 0
        """Taken so far."""
        self._max_pending = _SHRINKAGE * int(files.token_lengths.max()) * fs.volume.model.max_positions
        self._lock = trio.Lock()
        self._is_torn = False
        """A write was interrupted, and not repeated since."""
        self._is_killed = True
        """The last FLUSH came from a process that a signal is killing; or there was none, and nothing was written."""
        self._error: SymError | None = None
        self._gone = trio.Event()

    # What the mount calls

    async def write(self, data: bytes) -> int:
        """Take text; wait while too much is on its way. How many bytes were taken: fewer if it was interrupted."""
        async with self._lock:
            self._require_good()
            if not self.has_begun:
                self.has_begun, self._is_killed = True, False
                self._first, self._cuts = self._handle.table.length, self._handle.content.cuts
            taken = 0
            try:
                while taken < len(data):
                    await self._prefill.wait(MAX_QUEUED_TOKENS)
                    await self._take(data[taken : taken + _PIECE_BYTES])
                    taken = min(taken + _PIECE_BYTES, len(data))
            except trio.Cancelled:  # the only await that can be cancelled is the wait: nothing is taken by halves
                self._is_torn = True
                if not taken:
                    raise
            else:
                self._is_torn = False
            self.num_bytes += taken
            return taken

    async def flush(self, pid: int) -> None:
        """Process `pid` (0: unknown) closed a descriptor. Wait until all is computed, or raise and leave nothing."""
        self._is_killed = is_killed(pid)
        if self._is_killed:
            return  # nobody looks at the answer; if this was the last descriptor, `release` comes next
        try:
            async with self._lock:
                await self._finish()
        except trio.Cancelled:
            self._fail(_interrupted())
            raise
        except SymError:
            await self._gone.wait()
            raise

    async def settle(self) -> None:
        """Wait until all is computed that was taken, but for the end where that is no whole character yet, or raise
        and leave nothing.
        """
        try:
            async with self._lock:
                if self._is_torn or self._utf8.getstate()[0]:
                    self._require_good()
                    await self._prefill.wait(0)
                else:
                    await self._finish()
        except SymError:
            await self._gone.wait()
            raise

    async def release(self) -> None:
        """The last descriptor was closed: what is not whole by now never will be."""
        try:
            if self._is_killed:
                self._fail(_interrupted())
            else:
                async with self._lock:
                    await self._finish()
        except SymError as error:
            log.debug("inode %d: %s", self._handle.inode.number, error)
        finally:
            self.close()

    def close(self) -> None:
        """Give the file back, once no step works on it. Without a `flush` before, the rest of the text is left out."""
        self._prefill.stop(self._over)

    def _over(self) -> None:
        self._holdings.let_go(Kind.TEXT, num_bytes=self._held_bytes)
        self._fs.kv_close(self._handle)

    # The way of the text

    async def _take(self, data: bytes) -> None:
        self._reopen_rest()
        try:
            self._pending += self._utf8.decode(data)
        except UnicodeDecodeError as error:
            raise self._failure(Invalid(f"{self._name}: the text is not UTF-8: {error.reason}")) from None
        await self._queue(is_whole=False)
        if len(self._pending) > self._max_pending:
            raise self._failure(self._too_long())
        held_bytes = max(0, _CHAR_BYTES * len(self._pending) - _PIECE_BYTES)
        try:
            self._holdings.hold(Kind.TEXT, 0, held_bytes - self._held_bytes)
        except OverQuota as error:
            raise self._failure(error) from None
        self._held_bytes = held_bytes

    async def _finish(self) -> None:
        """Tokenize what is left and wait until everything is computed."""
        self._require_good()
        if self._is_torn:
            raise self._failure(_interrupted())
        if self._utf8.getstate()[0]:
            raise self._failure(Invalid(f"{self._name}: the text ends in the middle of a UTF-8 character"))
        if self._pending:
            rest, before = self._pending, self._num_tokens
            await self._queue(is_whole=True)
            self._rest = (rest, self._num_tokens - before)
        await self._prefill.wait(0)

    async def _queue(self, *, is_whole: bool) -> None:
        """Send the tokens of the pending text on their way, as far as they are certain."""
        text = self._pending

        def tokenize() -> tuple[list[int], str]:
            return self._files.tokenize(text, is_whole=is_whole)

        try:
            if len(text) <= _INLINE_CHARS:
                tokens, self._pending = tokenize()
            else:
                with trio.CancelScope(shield=True):
                    tokens, self._pending = await trio.to_thread.run_sync(tokenize)
        except SymError as error:
            raise self._failure(error) from None
        self._require_good()  # a batch may have failed meanwhile
        room = self._fs.volume.model.max_positions - self._handle.table.next_position - self._prefill.num_queued
        if len(tokens) > room:
            raise self._failure(self._too_long())
        if tokens:
            self._num_tokens += len(tokens)
            self._prefill.append(tokens)

    def _reopen_rest(self) -> None:
        """More text follows after a FLUSH or an FSYNC: take back what was tokenized only for want of it."""
        if self._rest is None:
            return
        text, num_tokens = self._rest
        self._rest = None
        table = self._handle.table
        if table.reservation is None and self._is_last(self._num_tokens):  # else others went on from it
            self._fs.kv_truncate(self._handle, table.length - num_tokens)
            self._cuts = self._handle.content.cuts
            self._num_tokens -= num_tokens
            self._pending = text

    # Failure

    def _require_good(self) -> None:
        if self._error is not None:
            raise SymError(str(self._error), self._error.errno)

    def _failure(self, error: SymError) -> SymError:
        self._fail(error)
        return error

    def _fail(self, error: SymError) -> None:
        """The end: leave nothing of what was written."""
        if self._error is not None:
            return
        self._error = error
        log.info("%s: nothing was written: %s", self._name, error, extra={"file": self._name})
        self._remove_if_own()
        self._prefill.stop(self._take_back)

    def _remove_if_own(self) -> None:
        """Remove the file that was made for this writer, unless others have a part in it."""
        inode, content = self._handle.inode, self._handle.content
        is_own = not content.table.length or (not self._first and self._is_last(self._num_computed))
        if self._is_new and is_own and inode.content is content and content.users == _NAME_AND_WRITER:
            self._is_new = False
            try:
                self._fs.kv_remove_open(_ROOT, self._handle)
            except SymError as error:  # it has other names now, which the writer did not give it
                log.warning("%s: an incomplete text stays: %s", self._name, error, extra={"file": self._name})

    def _take_back(self) -> None:
        """No step works on the file: cut away what was computed, unless others went on from it."""
        if self._num_computed and self._is_last(self._num_computed):
            self._fs.kv_truncate(self._handle, self._first)
        self._remove_if_own()  # only now does it show where a step was working on the file
        self._gone.set()

    @property
    def _num_computed(self) -> int:
        """The writer's tokens in calls that are over; one that is not may have left entries, too."""
        return self._num_tokens - self._prefill.num_queued

    def _is_last(self, num_tokens: int) -> bool:
        """Whether the file ends in so many tokens of the writer's: after a cut by others, the length does not tell."""
        content = self._handle.content
        return content.cuts == self._cuts and content.table.length == self._first + num_tokens

    def _too_long(self) -> SymError:
        limit = self._fs.volume.model.max_positions
        return SymError(f"{self._name}: the text is too long: the model's context has {limit} tokens", errno.EFBIG)

    @property
    def _name(self) -> str:
        return str(self._fs.volume.tree.path_of(self._handle.inode))


def is_killed(pid: int) -> bool:
    """Whether a signal is ending this process or thread: the kernel shows its number as the exit code by then."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return bool(int(fields[-1]) & 0x7F)
    except (OSError, IndexError, ValueError):  # gone, or not to be seen from here
        return False


def _interrupted() -> SymError:
    return SymError("the writer was interrupted", errno.EINTR)
