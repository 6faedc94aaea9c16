"""A conversation in a KV file: its turns, their beginnings in the file, and its pending tokens."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar, cast

from libsym.arguments import Path, shown
from libsym.calls.faces import script_of
from libsym.calls.generate import GOES_ON, Generation, Grammar, Ngram, Options, Progress, generate_call, sampler_of
from libsym.calls.kv import KV, kv_close, kv_fork, kv_lock, kv_read, kv_stat, kv_truncate
from libsym.calls.open_file import channel_of, length_script
from libsym.calls.pred import write_script
from libsym.calls.text import chat_tokens, tokenize
from libsym.channel.scripts import Script
from libsym.channel.vocabulary import vocabulary_script
from libsym.errors import Invalid, NoSpace, OverQuota, SymError, WouldBlock
from libsym.rows.sampler import Sampler

log = logging.getLogger(__name__)
Message = Mapping[str, Any]
G = TypeVar("G", bound=Progress)
PROBES = ("a", "Z", "1", " ", "\n", "é")
"""Questions that begin with different characters. So the turns of these questions have only the template's text in
common.
"""
_JOINED_TOKENS = 8
"""Number of tokens that are read beyond a known text. In the file, the last token of the text may be joined with text
behind it. So many tokens surely contain the joined token.
"""


class Turns(Generic[G]):
    """Turns of a conversation: state and scripts. In `Chat` a thread runs the scripts, in `AsyncChat` a task."""

    def __init__(
        self,
        kv: KV,
        messages: str | Sequence[Message] = (),
        tools: Sequence[Any] | None = None,
        *,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int | None = None,
    ) -> None:
        channel_of(kv, type(self).__name__)
        self._settings = Options(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
        sampler_of(self._settings)  # checks the settings
        self.kv = kv
        """The file of the conversation. The program may fork, read and advise it like any other file."""
        self._top = [{"role": "system", "content": messages}] if isinstance(messages, str) else list(messages)
        self._tools = tools
        self._answer: G | None = None
        self._pending: list[int] = []  # pending tokens of the conversation before the current answer
        self._before: list[int] = []  # tokens pending before the last question; pending again if the question is lost
        self._start = 0  # the file's length before the last question
        self._first_draw = 0  # serial number of the first draw of the last answer
        self._turn_at = 0  # index of the turn's beginning in the tokens of the last question, for the daemon
        self._num_cuts = kv.num_cuts  # pending tokens are void if the program itself cuts the file
        self._length = 0  # the file's length at the end of the last turn

    def __repr__(self) -> str:
        return f"<{type(self).__name__} in {self.kv!r}>"

    @property
    def answer(self) -> G | None:
        """The answer of the current turn, from the time that its question is sent. None: no turn is under way.

        >>> chat = sym.Chat(sym.kv_create())
        >>> chat.answer is None, chat.ask("Hello", max_tokens=3) is chat.answer
        (True, True)
        """
        return self._answer

    @property
    def pending(self) -> list[int]:
        """Tokens of the conversation that are not in the file yet. The next question appends them.

        >>> chat = sym.Chat(sym.kv_create())
        >>> len(chat.ask("Hello", max_tokens=3).full_text()), len(chat.pending)
        (3, 1)
        """
        if self._num_cuts != self.kv.num_cuts:
            return []
        answer = self._answer
        if answer is None:
            return [*self._pending]
        return [*self._before] if self._is_unasked(answer) else answer.pending

    def _is_unasked(self, answer: G) -> bool:
        """Return whether a turn ended before its answer began, or before the program read any part of the answer.

        The question of such a turn does not count.
        """
        return answer.is_lost or (answer.is_cancelled and not answer.is_read)

    def _end_of_turn(self) -> Script[tuple[int | None, list[int]]]:
        """Return the length to which the file must be cut after the last turn (None: no cut), and the pending tokens.

        A cancelled answer keeps the part that the program has read.
        """
        answer = self._answer
        if self._num_cuts != self.kv.num_cuts or answer is None:
            return None, self.pending
        if self._is_unasked(answer):
            return self._start, [*self._before]
        if answer.is_cancelled:
            return (yield from answer.read_part())
        yield from answer.drop_stop()
        return None, answer.pending

    def _talk(self) -> Script[None]:
        """Lock the file until `close`, so that no other conversation uses it.

        If this handle has the lock already, the lock stays as it is. If the conversation had no lock for some time, and
        another conversation appended to the file in that time, the pending tokens are dropped.
        """
        talker = self.kv.talker and self.kv.talker()
        if talker is not None and talker is not self:
            raise WouldBlock(f"{self.kv.name}: another conversation goes on by this handle; close that, or fork() it")
        if self.kv.path is not None and not self.kv.is_locked:
            yield from script_of(kv_lock)(self.kv, blocking=False)
            if self.pending and (yield from length_script(self.kv)) != self._ended_at():
                self._forget_pending()
        self.kv.talker = weakref.ref(self)

    def _forget_pending(self) -> None:
        log.warning("%s went on without the last %d tokens of this chat", self.kv.name, len(self.pending))
        self._settled([])

    def _ended_at(self) -> int:
        """Return the file's length at the end of the last turn."""
        answer = self._answer
        return self._length if answer is None or answer.num_entries is None else answer.num_entries

    def _end_turn(self) -> Script[None]:
        """Cut the file after the last turn, and set the pending tokens. The caller has ended the turn's answer."""
        length, pending = yield from self._end_of_turn()
        if length is not None and (yield from length_script(self.kv)) > length:
            yield from script_of(kv_truncate)(self.kv, length)
        self._length = self._ended_at() if length is None else length
        self._settled(pending)

    def _settled(self, pending: list[int]) -> None:
        self._answer, self._pending, self._num_cuts = None, pending, self.kv.num_cuts

    def _question(self, content: str | Sequence[Message], role: str, begin: str) -> Script[list[int]]:
        """Return the pending tokens and the tokens of a new turn. The caller has ended the last answer."""
        if not isinstance(content, str) and not isinstance(content, Sequence):
            raise Invalid(f"ask({shown(content)}): a text, or a list of messages")
        turn: list[Message] = [{"role": role, "content": content}] if isinstance(content, str) else list(content)
        yield from self._talk()
        yield from self._end_turn()
        self._start = yield from length_script(self.kv)
        if self._pending and self._start != self._length:  # another handle has changed the file: locks are advisory
            self._forget_pending()
        pending = self._pending
        self._first_draw = self._start + len(pending)
        is_users = any(message.get("role") == "user" for message in turn if isinstance(message, Mapping))
        self._turn_at = len(pending) if is_users or not self._first_draw else GOES_ON
        if self._first_draw:
            tokens = yield from script_of(chat_tokens)(turn, after_answer=True)
        else:
            tokens = yield from script_of(chat_tokens)([*self._top, *turn], self._tools)
        if begin:
            tokens += yield from script_of(tokenize)(begin, special=False)
        return pending + tokens

    def _with_settings(self, options: Options) -> Options:
        """Return the options of a question. If the question has no sampler, the conversation's settings are the
        defaults.
        """
        given = {name: value for name, value in options.items() if value is not None}
        return options if "sampler" in given else cast(Options, {**options, **self._settings, **given})

    def _answered_by(self, answer: G) -> G:
        """Note a new answer, whose call appends the pending tokens."""
        self._before, self._answer = self._pending, answer
        return answer

    def _undo(self) -> Script[None]:
        """Cut the file at the beginning of the last turn. The daemon's notes name this place; without notes, the tokens
        show the place.
        """
        yield from self._talk()
        yield from self._end_turn()
        turns = (yield from script_of(kv_stat)(self.kv)).turns
        if turns:
            yield from script_of(kv_truncate)(self.kv, turns[-1])
            self._length = turns[-1]
            self._settled([])
            return
        in_file, _ = yield from script_of(kv_read)(self.kv)
        tokens = in_file + self._pending
        if not tokens:
            raise Invalid(f"{self.kv.name}: there is no turn to undo")
        later, beginnings, bare = [], [], []
        for probe in PROBES:
            question = {"role": "user", "content": probe}
            later.append((yield from script_of(chat_tokens)([question], after_answer=True)))
            beginnings.append((yield from script_of(chat_tokens)([*self._top, question], self._tools)))
            bare.append((yield from script_of(chat_tokens)([question])))
        vocabulary = yield from vocabulary_script(self.kv.channel)
        at = last_turn(tokens, later, vocabulary)
        if at is None and not any(_begin_alike(tokens, heads, vocabulary) for heads in (beginnings, bare)):
            raise Invalid(f"{self.kv.name}: there is no turn to undo")
        if at is None or _in_common([*beginnings, tokens[:at]]) == tokens[:at]:
            at = 0  # the system message and the tools are part of the first turn
        if at < len(in_file):
            yield from script_of(kv_truncate)(self.kv, at)
        self._length = min(at, len(in_file))
        self._settled(tokens[len(in_file) : at])

    def _fork(self, path: Path | None) -> Script[Self]:
        length: int | None = self._start
        pending = self._before
        if not self._is_answering:
            length, pending = yield from self._end_of_turn()
        is_others = self.kv.talker is None or self.kv.talker() is not self
        kv = yield from script_of(kv_fork)(self.kv, path, ended=is_others)
        if length is not None and (yield from length_script(kv)) > length:
            yield from script_of(kv_truncate)(kv, length)
        fork = type(self)(kv, self._top, self._tools)
        fork._settings = self._settings  # noqa: SLF001 - of this class
        fork._pending, fork._length = [*pending], (yield from length_script(kv))  # noqa: SLF001 - of this class
        return fork

    @property
    def _is_answering(self) -> bool:
        return self._answer is not None and self._answer.finish is None and not self._answer.is_over

    def _close(self) -> Script[None]:
        """Write the pending tokens and close the file, even if a full context or quota prevents the write."""
        if self.kv.closed:
            return
        try:
            yield from self._end_turn()
            if self._pending and self.kv.path is not None:  # an anonymous file is removed with its handle
                yield from write_script(self.kv, self._pending)
                self._settled([])
        except (Invalid, OverQuota, NoSpace) as error:
            log.warning("%s lacks its last %d tokens: %s", self.kv.name, len(self._pending), error)
        finally:
            yield from script_of(kv_close)(self.kv)


class Chat(Turns[Generation]):
    r"""A conversation in a KV file: `ask` appends a question, and returns the model's answer as a stream.

    >>> with sym.Chat(sym.kv_open("chat.kv", "a"), "You are brief.") as chat:
    ...     first = chat.ask("Who are you?", max_tokens=4).full_text()
    ...     second = chat.ask("And I?", max_tokens=4).full_text()
    >>> text = sym.detokenize(sym.kv_read("chat.kv")[0])
    >>> text.partition("\nuser: And I?\n")[0] == f"<bos>system: You are brief.\nuser: Who are you?\nassistant: {first}"
    True

    `kv`: a file that is open for writing. In an empty file, the conversation begins with `messages` (a text is the
    system message) and `tools`. If the file has a conversation, perhaps from an earlier run, the Chat continues it. No
    token is computed before the first question. One thread at a time may use a Chat.
    `temperature`, `top_k`, `top_p`, `min_p`, `seed`: defaults for questions without a sampler.

    If the file has a name, a Chat holds the file's lock from its first question or `undo` until the Chat is closed (see
    `kv_lock`). WouldBlock: another conversation holds the lock; the message names the holder. If the program has
    already locked `kv`, that lock stays as it is.
    """

    def ask(
        self,
        content: str | Sequence[Message],
        *,
        role: str = "user",
        begin: str = "",
        sampler: Sampler | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        stop: str | int | Iterable[str | int] = (),
        stop_at_end: bool = True,
        keep_stop: bool = False,
        max_tokens: int | None = None,
        grammar: Grammar | None = None,
        draft: Literal["ngram"] | Ngram | None = None,
        logprobs: int | None = None,
        seed: int | None = None,
        before: Iterable[int] | None = None,
        priority: int | None = None,
        deadline: float | None = None,
    ) -> Generation:
        """Append a message, or several, and return the answer as a stream. The options are the same as in `generate`.

        `begin`: text with which the answer begins. The model does not generate it, and `text()` leaves it out.
        `before`: tokens that the repetition penalty counts as said before the question, perhaps the whole file.
        `keep_stop`: leave the stop text of an answer in the conversation. By default it is cut off.

        An earlier answer that is still under way is cancelled. The conversation keeps the part of that answer that the
        program has read. If the program has read no part, the conversation drops the answer's question, too.

        >>> chat = sym.Chat(sym.kv_create())
        >>> answer = chat.ask("Is it?", begin="I say ", grammar=sym.Grammar.regex("yes|no"))
        >>> answer.full_text() in ("yes", "no")
        True
        """
        self._cancel()
        tokens = self.kv.channel.run(self._question(content, role, begin))
        options = Options(
            sampler=sampler,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            stop=stop,
            stop_at_end=stop_at_end,
            keep_stop=keep_stop,
            max_tokens=max_tokens,
            grammar=grammar,
            draft=draft,
            logprobs=logprobs,
            seed=seed,
            first_draw=self._first_draw,
            turn_at=self._turn_at,
            before=None if before is None else [*before, *tokens],
            priority=priority,
            deadline=deadline,
        )
        return self._answered_by(Generation(self.kv, *generate_call(self.kv, tokens, self._with_settings(options))))

    def undo(self) -> None:
        r"""Cut off the last turn: the user's question and everything after it.

        The daemon notes with the file where turns begin, so `undo` also works on turns of an earlier run. Without such
        notes, the beginning of the turn is found by its tokens. Invalid: the file has no turn, and is unchanged.

        >>> chat = sym.Chat(sym.kv_create())
        >>> first, second = (chat.ask(each, max_tokens=4).full_text() for each in ("Who?", "What?"))
        >>> chat.undo()
        >>> sym.detokenize(chat.kv.read()[0]) == f"<bos>user: Who?\nassistant: {first}"
        True
        """
        self._cancel()
        self.kv.channel.run(self._undo())

    def fork(self, path: Path | None = None) -> Chat:
        """Fork the file; return a Chat with the same conversation in the fork. The two conversations are independent.

        An answer that is under way continues. The fork then has the conversation before the question of that answer.

        >>> chat = sym.Chat(sym.kv_create(), "You are brief.")
        >>> answer = chat.ask("Who are you?", max_tokens=4).full_text()
        >>> fork = chat.fork("other.kv")
        >>> fork.ask("And I?", max_tokens=4).full_text() == chat.ask("And I?", max_tokens=4).full_text()
        True
        """
        return self.kv.channel.run(self._fork(path))

    def close(self) -> None:
        """End an answer that is under way, write pending tokens, and close the file, as the end of `with` does.

        >>> chat = sym.Chat(sym.kv_create())
        >>> chat.close()
        >>> chat.kv.closed
        True
        """
        self._cancel()
        self.kv.channel.run(self._close())

    def settle(self) -> None:
        """End an answer that is under way. Then the file and `pending` have exactly the text that the program has read.

        >>> chat = sym.Chat(sym.kv_create())
        >>> answer = chat.ask("Who?")
        >>> chat.settle()
        >>> chat.kv.len(), chat.pending
        (0, [])
        """
        self._cancel()
        self.kv.channel.run(self._end_turn())

    def _cancel(self) -> None:
        if self._answer is not None and self._is_answering and not self.kv.closed:
            self._answer.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        try:
            self.close()
        except SymError as error:
            if kind is None:
                raise
            if not issubclass(kind, type(error)):  # else the caller already gets such an error
                log.warning("%s was not closed in order after %s: %s", self.kv.name, kind.__name__, error)
        finally:
            self.kv.close()


def last_turn(tokens: list[int], turns: Sequence[list[int]], vocabulary: Sequence[bytes]) -> int | None:
    """Return the index at which the last turn begins. A turn begins with the common tokens of `turns`. None: there is
    no turn.

    In the file, the last common token may be joined with the question: two newlines are often one token. So the
    function searches for the tokens before the last common token, and then compares the text.
    """
    head = _in_common(turns)
    mark, text = head[:-1] or head, _text(head, vocabulary)
    for at in range(len(tokens) - len(mark), -1, -1):
        if tokens[at : at + len(mark)] == mark:
            behind = tokens[at : at + len(head) + _JOINED_TOKENS]
            if _text(behind, vocabulary).startswith(text):
                return at
    return None


def _begin_alike(tokens: list[int], turns: Sequence[list[int]], vocabulary: Sequence[bytes]) -> bool:
    """Return whether the text of `tokens` begins with the common beginning of all `turns`, compared as text."""
    head = _in_common(turns)
    return _text(tokens[: len(head) + _JOINED_TOKENS], vocabulary).startswith(_text(head, vocabulary))


def _text(tokens: list[int], vocabulary: Sequence[bytes]) -> bytes:
    return b"".join(vocabulary[token] for token in tokens)


def _in_common(turns: Sequence[list[int]]) -> list[int]:
    """Return the longest common prefix of all turns."""
    shortest = min(turns, key=len)
    length = next((i for i, token in enumerate(shortest) if any(turn[i] != token for turn in turns)), len(shortest))
    return shortest[:length]
