"""Writer of text to a context: `cat handbook.md > /kv/.symphony/text/handbook.kv`.

The daemon tokenizes and computes the text while a program writes it. The tokens do not depend on how the program
divides the text into writes: the writer queues a token only when no further text can change it. At a FLUSH (a program
closed one of the descriptors) or an FSYNC, the writer also tokenizes the rest of the text. If more text follows, the
writer removes the tokens of that rest, and tokenizes the rest again together with the new text.

A write of a text succeeds or fails as a whole. The writer fails if the pool is full, a step fails, the text is too long
or not UTF-8, or a signal kills the program. Then all text of this handle is removed. If the file was made for this
handle, the file is removed, too, unless it has other entries or another program has it open.

If a program is killed between two writes, the daemon notices only at the program's exit. So the last FLUSH counts as an
interruption if it is from a process that a signal is killing. A RELEASE without any FLUSH also counts as an
interruption: the program died during the open, before it had a descriptor to close. A third kind of interruption is a
write that was interrupted and never repeated, because a part of the text is missing.
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
"""A write waits while more tokens than this are queued. This number is enough for eight full steps, so the decoder
never has to wait for tokens.
"""

_PIECE_BYTES = 16 << 10
"""Size of the pieces into which a long write is divided. The write can wait and be interrupted between two pieces."""

_INLINE_CHARS = 2048
"""A text of up to this many characters is tokenized by the trio thread (0.2 ms), a longer text by a worker."""

_CHAR_BYTES = 4
"""The most bytes that one character takes in memory."""

_SHRINKAGE = 4
"""The largest ratio of a text's length to the length of its tokens' texts. NFC composition makes a text shorter."""

_NAME_AND_WRITER = 2
"""The number of users of a file's content if only this writer has the file open: the name and the writer."""

_ROOT = Credentials(0, 0)


class TextWriter:
    """Writer that appends the text of one open file description to a KV file."""

    def __init__(
        self, fs: FileSystem, files: ControlFiles, handle: OpenKv, holdings: Holdings, *, is_new: bool, pid: int
    ) -> None:
        """Take over `handle`, which the writer will close. `is_new`: the file was made for this writer, and is removed
        if the writer fails.

        `holdings` are the holdings of the user, which have room for one more text.
        """
        self._holdings = holdings
        holdings.charge(Kind.TEXT)
        self._held_bytes = 0
        """Number of bytes charged for pending text, in addition to the fixed charge for a text."""
        self._fs = fs
        self._files = files
        self._handle = handle
        self._is_new = is_new
        self._prefill = files.prefill(handle, pid, self._fail)
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._pending = ""
        """Text that is not tokenized yet, because the text that follows may change its tokens."""
        self._rest: tuple[str, int] | None = None
        """Text that the last FLUSH or FSYNC tokenized although more text may follow, and the number of its tokens."""
        self._first = handle.table.length
        self._cuts = handle.content.cuts
        self._num_tokens = 0
        self.has_begun = False
        self.num_bytes = 0
        """Bytes of text that the writer has accepted so far."""
        self._max_positions = fs.volume.model_of(handle.content).max_positions
        self._max_pending = _SHRINKAGE * int(files.token_lengths.max()) * self._max_positions
        self._lock = trio.Lock()
        self._is_torn = False
        """Whether a write was interrupted, and the program has not repeated that write since."""
        self._is_killed = True
        """Whether the last FLUSH was from a process that a signal was killing. Also true before the first FLUSH or
        write.
        """
        self._error: SymError | None = None
        self._gone = trio.Event()

    # Methods for the mount

    async def write(self, data: bytes) -> int:
        """Accept text, and wait while too many tokens are queued. Return the number of bytes accepted. After an
        interruption, this is only a part of the data.
        """
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
            except trio.Cancelled:  # only the wait can be cancelled, so no piece is taken in part
                self._is_torn = True
                if not taken:
                    raise
            else:
                self._is_torn = False
            self.num_bytes += taken
            return taken

    async def flush(self, pid: int) -> None:
        """Note that process `pid` (0: unknown) closed a descriptor. Wait until all text is computed. On failure, remove
        the text and raise.
        """
        self._is_killed = is_killed(pid)
        if self._is_killed:
            return  # a dying process ignores the answer; `release` follows the last close
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
        """Wait until all accepted text is computed. On failure, remove the text and raise. If the text ends in an
        incomplete character, or a write was interrupted, wait only for the tokens that are queued already.
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
        """End the text after the last descriptor was closed. If the text is incomplete, the writer fails."""
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
        """Close the file as soon as no step works on it. Text that is still pending is dropped."""
        self._prefill.stop(self._over)

    def _over(self) -> None:
        self._holdings.let_go(Kind.TEXT, num_bytes=self._held_bytes)
        self._fs.kv_close(self._handle)

    # From text to tokens

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
        """Tokenize the pending text, and wait until all tokens are computed."""
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
        """Queue the tokens of the pending text. Without `is_whole`, queue only the tokens that further text cannot
        change.
        """
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
        room = self._max_positions - self._handle.table.next_position - self._prefill.num_queued
        if len(tokens) > room:
            raise self._failure(self._too_long())
        if tokens:
            self._num_tokens += len(tokens)
            self._prefill.append(tokens)

    def _reopen_rest(self) -> None:
        """Remove the tokens of the rest that a FLUSH or FSYNC tokenized, because more text follows that rest."""
        if self._rest is None:
            return
        text, num_tokens = self._rest
        self._rest = None
        table = self._handle.table
        if table.reservation is None and self._is_last(self._num_tokens):  # else another program changed the file
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
        """Fail for good, and remove all text of this writer."""
        if self._error is not None:
            return
        self._error = error
        log.info("%s: nothing was written: %s", self._name, error, extra={"file": self._name})
        self._remove_if_own()
        self._prefill.stop(self._take_back)

    def _remove_if_own(self) -> None:
        """Remove the file that was made for this writer, unless another program has the file open or appended to it."""
        inode, content = self._handle.inode, self._handle.content
        is_own = not content.table.length or (not self._first and self._is_last(self._num_computed))
        if self._is_new and is_own and inode.content is content and content.users == _NAME_AND_WRITER:
            self._is_new = False
            try:
                self._fs.kv_remove_open(_ROOT, self._handle)
            except SymError as error:  # a program has given the file further names
                log.warning("%s: an incomplete text stays: %s", self._name, error, extra={"file": self._name})

    def _take_back(self) -> None:
        """Cut off the writer's computed entries, unless another program has appended after them. No step works on the
        file now.
        """
        if self._num_computed and self._is_last(self._num_computed):
            self._fs.kv_truncate(self._handle, self._first)
        self._remove_if_own()  # if a step was working on the file, the file can be removed only now
        self._gone.set()

    @property
    def _num_computed(self) -> int:
        """Number of the writer's tokens whose calls have ended. A call under way may already have appended more
        entries.
        """
        return self._num_tokens - self._prefill.num_queued

    def _is_last(self, num_tokens: int) -> bool:
        """Whether the file consists of the entries before this text and `num_tokens` tokens of the writer. The length
        alone does not show this, because another program may have cut the file and appended to it.
        """
        content = self._handle.content
        return content.cuts == self._cuts and content.table.length == self._first + num_tokens

    def _too_long(self) -> SymError:
        return SymError(
            f"{self._name}: the text is too long: the model's context has {self._max_positions} tokens", errno.EFBIG
        )

    @property
    def _name(self) -> str:
        return str(self._fs.volume.tree.path_of(self._handle.inode))


def is_killed(pid: int) -> bool:
    """Whether a signal is killing this process or thread. The kernel shows the signal in the exit code before the
    process has ended.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return bool(int(fields[-1]) & 0x7F)
    except (OSError, IndexError, ValueError):  # the process has ended, or the daemon can't see it
        return False


def _interrupted() -> SymError:
    return SymError("the writer was interrupted", errno.EINTR)
