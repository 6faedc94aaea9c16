"""Link: the daemon's side of a launcher's connection. Messages and questions are sent in the order in which callers
queued them.

The daemon never waits for a launcher that does not read: a message for which the queue has no room is refused. A caller
may stop waiting for an answer. The answer is then dropped, or given to the question's `late`, which cleans up.
"""

from __future__ import annotations

import errno
import json
from collections import deque
from collections.abc import Callable
from typing import Any

import trio

from libsym.errors import SymError, TooLarge, WouldBlock

MAX_MESSAGE_BYTES = 64 << 10
MAX_WAITING_BYTES = 1 << 20
"""Maximum number of bytes of messages that the launcher has not read."""
MAX_ASKED = 4096
"""Maximum number of questions without an answer. Each thread of a program may wait for an answer."""

Message = dict[str, Any]


class _Question:
    """Question to the launcher. Several callers may wait for its answer."""

    __slots__ = ("answer", "answered", "late", "num_waiting")

    def __init__(self, late: Callable[[Message], None] | None) -> None:
        self.answered = trio.Event()
        self.answer: Message | SymError | None = None
        self.num_waiting = 0
        self.late = late


class Link:
    """Link to one launcher, on the trio thread. The socket is in `scheduler/doors/launchers.py`."""

    def __init__(self, uid: int, gid: int) -> None:
        self.uid = uid
        self.gid = gid
        self.is_closed = False
        self.broken_off = trio.Event()
        self._waiting: deque[bytes] = deque()
        self._num_bytes = 0
        self._changed = trio.Event()
        self._read = trio.Event()
        self._questions: dict[int, _Question] = {}
        self._same: dict[tuple[str, ...], int] = {}
        """Serial numbers of open questions that several callers may share, by key."""
        self._next = 1

    # ---- called by operations

    def tell(self, message: Message) -> None:
        """Queue a message until the launcher reads it. WouldBlock: too many bytes are queued already."""
        data = json.dumps(message, ensure_ascii=False).encode("utf-8", "replace")
        if len(data) > MAX_MESSAGE_BYTES:
            raise TooLarge(
                f"a message of {len(data)} bytes for the launcher: {MAX_MESSAGE_BYTES} is the most, put what is long "
                "into a file"
            )
        if self.is_closed:
            raise _gone()
        if self._num_bytes + len(data) > MAX_WAITING_BYTES:
            raise WouldBlock("the launcher does not read what it is asked: try again later")
        self._waiting.append(data)
        self._num_bytes += len(data)
        self._changed.set()

    def demand(self, message: Message) -> None:
        """Send a question without waiting for the answer."""
        self._ask(message, (), None)

    async def ask(
        self, message: Message, *, same: tuple[str, ...] = (), late: Callable[[Message], None] | None = None
    ) -> Message:
        """Return the launcher's answer, or raise the error with which it refuses.

        `same` is a key: while a question with this key is open, callers with the same key share its answer. So a caller
        that gives up leaves one open question, which the next caller joins. `late` gets an answer for which no caller
        waits.
        """
        number = self._same.get(same, 0) if same else 0
        if not number:
            number = self._ask(message, same, late)
        question = self._questions[number]
        question.num_waiting += 1
        try:
            await question.answered.wait()
        finally:
            question.num_waiting -= 1
        if isinstance(question.answer, SymError):
            raise SymError(str(question.answer), question.answer.errno)
        assert question.answer is not None
        return question.answer

    def _ask(self, message: Message, same: tuple[str, ...], late: Callable[[Message], None] | None) -> int:
        if len(self._questions) >= MAX_ASKED:
            raise WouldBlock(f"the launcher has {MAX_ASKED} questions to answer already: try again later")
        number = self._next
        self.tell({"d": number, **message})
        self._next += 1
        self._questions[number] = _Question(late)
        if same:
            self._same[same] = number
        return number

    # ---- called by the socket's tasks

    def answered(self, number: int, answer: Message | SymError) -> bool:
        """Hand the launcher's answer to its question. False: no question has this number."""
        question = self._questions.pop(number, None)
        if question is None:
            return False
        self._same = {key: other for key, other in self._same.items() if other != number}
        question.answer = answer
        question.answered.set()
        if not question.num_waiting and question.late is not None and not isinstance(answer, SymError):
            question.late(answer)
        return True

    async def next(self) -> bytes:
        """Wait for the next message to be sent."""
        while not self._waiting:
            self._changed = trio.Event()
            await self._changed.wait()
        data = self._waiting.popleft()
        self._num_bytes -= len(data)
        self._read.set()
        return data

    async def has_room(self) -> None:
        """Wait until there is room for answers. The daemon stops reading from a launcher that does not read."""
        while self._num_bytes + MAX_MESSAGE_BYTES > MAX_WAITING_BYTES:
            self._read = trio.Event()
            await self._read.wait()

    def break_off(self) -> None:
        """Close the connection to a launcher that leaves an important message unread.

        When the launcher has connected again, the message is sent again.
        """
        self.broken_off.set()

    def close(self) -> None:
        """Fail all open questions: the launcher has gone."""
        self.is_closed = True
        self._waiting.clear()
        self._num_bytes = 0
        questions, self._questions = self._questions, {}
        self._same = {}
        for question in questions.values():
            question.answer = _gone()
            question.answered.set()


def _gone() -> SymError:
    return SymError("the launcher of this program has gone, and may come back: try again later", errno.EHOSTDOWN)
