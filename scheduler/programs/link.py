"""What a launcher is told and asked, in the order in which that was: the daemon's half of one connection of a launcher.

Nobody waits for a launcher that does not read: what finds no room is refused. Whoever waits for an answer may give up;
an answer that nobody waits for any more is dropped, or goes to whoever cleans up behind it.
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
"""Of messages that the launcher has not read."""
MAX_ASKED = 4096
"""Questions that it has not answered: each program may have one for each of its threads."""

Message = dict[str, Any]


class _Question:
    """One that is asked, by however many."""

    __slots__ = ("answer", "answered", "late", "num_waiting")

    def __init__(self, late: Callable[[Message], None] | None) -> None:
        self.answered = trio.Event()
        self.answer: Message | SymError | None = None
        self.num_waiting = 0
        self.late = late


class Link:
    """All of it on the trio thread. `scheduler/launchers.py` has the socket."""

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
        """Questions that several may ask."""
        self._next = 1

    # ---- what others say

    def tell(self, message: Message) -> None:
        """It is sent as soon as the launcher reads. WouldBlock: too much waits for that already."""
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
        """Ask without waiting for the answer."""
        self._ask(message, (), None)

    async def ask(
        self, message: Message, *, same: tuple[str, ...] = (), late: Callable[[Message], None] | None = None
    ) -> Message:
        """The launcher's answer; what it refuses is raised.

        `same`: whoever asks with this key while another waits for the answer gets that one's; so a wait that is given
        up leaves no more behind than the next finds. `late` gets an answer that nobody waits for any more.
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

    # ---- what the socket does

    def answered(self, number: int, answer: Message | SymError) -> bool:
        """The launcher has answered. False: it was not asked this."""
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
        """Wait until there is room for answers: a launcher that does not read is not listened to."""
        while self._num_bytes + MAX_MESSAGE_BYTES > MAX_WAITING_BYTES:
            self._read = trio.Event()
            await self._read.wait()

    def break_off(self) -> None:
        """It has to be told something, and does not read: it is to come again, and hear it then."""
        self.broken_off.set()

    def close(self) -> None:
        """The launcher has gone: whoever waits for an answer of it hears that."""
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
