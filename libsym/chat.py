"""A conversation on a KV file: whose turn it is, what the file holds of it, and where its turns begin."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar, cast

from libsym.arguments import Path, shown
from libsym.channel.scripts import Script
from libsym.channel.vocabulary import vocabulary_script
from libsym.errors import Invalid, NoSpace, OverQuota, SymError, WouldBlock
from libsym.faces import script_of
from libsym.generate import GOES_ON, Generation, Grammar, Ngram, Options, Progress, generate_call, sampler_of
from libsym.kv import KV, kv_close, kv_fork, kv_lock, kv_read, kv_stat, kv_truncate
from libsym.open_file import channel_of, length_script
from libsym.pred import write_script
from libsym.rows.sampler import Sampler
from libsym.text import chat_tokens, tokenize

log = logging.getLogger(__name__)
Message = Mapping[str, Any]
G = TypeVar("G", bound=Progress)
PROBES = ("a", "Z", "1", " ", "\n", "é")
"""Questions that begin differently: what their turns have in common is the template's."""
_JOINED_TOKENS = 8
"""Tokens that hold the text of one, in whatever way that was joined with others."""


class Turns(Generic[G]):
    """Turns of a conversation, for its two faces: `Chat` waits with the thread, `AsyncChat` with the task."""

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
        sampler_of(self._settings)  # says what is wrong in them
        self.kv = kv
        """The file: it can be forked, read and advised as any other."""
        self._top = [{"role": "system", "content": messages}] if isinstance(messages, str) else list(messages)
        self._tools = tools
        self._answer: G | None = None
        self._pending: list[int] = []  # of answers before the last one
        self._before: list[int] = []  # what was pending before the last question: it is again, if that is lost
        self._start = 0  # the file's length before the last question
        self._first_draw = 0  # of the last answer
        self._turn_at = 0  # where the last turn begins in the tokens of its question, for the daemon
        self._num_cuts = kv.num_cuts  # the program's own cuts end what is pending
        self._length = 0  # the file's, as the last turn has ended

    def __repr__(self) -> str:
        return f"<{type(self).__name__} in {self.kv!r}>"

    @property
    def answer(self) -> G | None:
        """The answer of the turn that has begun, from the moment that its question is sent; None between turns.

        >>> chat = sym.Chat(sym.kv_create())
        >>> chat.answer is None, chat.ask("Hello", max_tokens=3) is chat.answer
        (True, True)
        """
        return self._answer

    @property
    def pending(self) -> list[int]:
        """Tokens of the conversation that are not in the file yet: the next question brings them.

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
        """Whether a turn ended before its answer began, or before anybody had read of it: it was never asked."""
        return answer.is_lost or (answer.is_cancelled and not answer.is_read)

    def _end_of_turn(self) -> Script[tuple[int | None, list[int]]]:
        """Where the file is to end as the last turn has ended, None for where it does, and what is pending then.

        An answer that was cancelled stays as far as the program has read it.
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
        """Lock the file until `close`, so that nobody else talks in it.

        A lock that this handle has already is left as it is. Where the conversation had lost its lock since its last
        turn, and another has gone on meanwhile, what was pending has no place in the file any more.
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
        """The file's length, as the last turn left it."""
        answer = self._answer
        return self._length if answer is None or answer.num_entries is None else answer.num_entries

    def _end_turn(self) -> Script[None]:
        """Make file and pending tokens what they are when the last turn has ended. No answer is under way."""
        length, pending = yield from self._end_of_turn()
        if length is not None and (yield from length_script(self.kv)) > length:
            yield from script_of(kv_truncate)(self.kv, length)
        self._length = self._ended_at() if length is None else length
        self._settled(pending)

    def _settled(self, pending: list[int]) -> None:
        self._answer, self._pending, self._num_cuts = None, pending, self.kv.num_cuts

    def _question(self, content: str | Sequence[Message], role: str, begin: str) -> Script[list[int]]:
        """The tokens of a turn, behind those that are pending. No answer is under way."""
        if not isinstance(content, str) and not isinstance(content, Sequence):
            raise Invalid(f"ask({shown(content)}): a text, or a list of messages")
        turn: list[Message] = [{"role": role, "content": content}] if isinstance(content, str) else list(content)
        yield from self._talk()
        yield from self._end_turn()
        self._start = yield from length_script(self.kv)
        if self._pending and self._start != self._length:  # by another handle: locks are advice
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
        """The options of a question; where it names no sampler, with the conversation's settings that it leaves out."""
        given = {name: value for name, value in options.items() if value is not None}
        return options if "sampler" in given else cast(Options, {**options, **self._settings, **given})

    def _answered_by(self, answer: G) -> G:
        """From here on what is pending is the answer's affair."""
        self._before, self._answer = self._pending, answer
        return answer

    def _undo(self) -> Script[None]:
        """Cuts the file where the last turn begins: where that is noted with the file, or else where its tokens say."""
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
            at = 0  # the first turn goes with the top of the conversation
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
        """The file is closed, whatever becomes of the pending tokens: a full context or quota has no room for them."""
        if self.kv.closed:
            return
        try:
            yield from self._end_turn()
            if self._pending and self.kv.path is not None:  # without a name nobody will read it
                yield from write_script(self.kv, self._pending)
                self._settled([])
        except (Invalid, OverQuota, NoSpace) as error:
            log.warning("%s lacks its last %d tokens: %s", self.kv.name, len(self._pending), error)
        finally:
            yield from script_of(kv_close)(self.kv)


class Chat(Turns[Generation]):
    r"""A conversation that a KV file holds: `ask` appends a question, and the model's answer streams.

    >>> with sym.Chat(sym.kv_open("chat.kv", "a"), "You are brief.") as chat:
    ...     first = chat.ask("Who are you?", max_tokens=4).full_text()
    ...     second = chat.ask("And I?", max_tokens=4).full_text()
    >>> text = sym.detokenize(sym.kv_read("chat.kv")[0])
    >>> text.partition("\nuser: And I?\n")[0] == f"<bos>system: You are brief.\nuser: Who are you?\nassistant: {first}"
    True

    `kv`: open for writing. Where it is empty, the conversation begins with `messages` (a text is the system message)
    and `tools`; where it holds one, perhaps of an earlier run, that goes on. Nothing is computed before the first
    question. One thread at a time may use it.
    `temperature`, `top_k`, `top_p`, `min_p`, `seed`: of answers whose question names none of its own, and no sampler.

    From its first question or `undo` on, until it is closed, it has the lock of a file with a name (see `kv_lock`), and
    nobody else talks in that: `WouldBlock` says who does. A lock that the program has taken by `kv` is left as it is.
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
        """Appends a message, or several, and gives the answer as it comes; what the answer takes is as in `generate`.

        `begin`: the answer begins with this text, which is given, not generated: it is no part of `text()`.
        `before`: what the repetition penalty counts as said before beside the question, the whole file perhaps.
        `keep_stop`: a stop text that ended the answer is a part of the conversation; else nobody sees it again.
        An answer that is still under way is cancelled: it stays in the conversation as far as the program has read it,
        and the question goes with an answer that nothing was read of.

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
        r"""Cuts off the last turn: the user's question and all that came after it. The file is as it was before.

        Where turns begin is noted with the file, so this works on turns of an earlier run, too; of a file without notes
        the tokens say. Invalid, and the file stays, where it holds no turn.

        >>> chat = sym.Chat(sym.kv_create())
        >>> first, second = (chat.ask(each, max_tokens=4).full_text() for each in ("Who?", "What?"))
        >>> chat.undo()
        >>> sym.detokenize(chat.kv.read()[0]) == f"<bos>user: Who?\nassistant: {first}"
        True
        """
        self._cancel()
        self.kv.channel.run(self._undo())

    def fork(self, path: Path | None = None) -> Chat:
        """The same conversation in a fork of the file: both go on by themselves.

        An answer that is under way goes on, and the fork is as the conversation was before its question.

        >>> chat = sym.Chat(sym.kv_create(), "You are brief.")
        >>> answer = chat.ask("Who are you?", max_tokens=4).full_text()
        >>> fork = chat.fork("other.kv")
        >>> fork.ask("And I?", max_tokens=4).full_text() == chat.ask("And I?", max_tokens=4).full_text()
        True
        """
        return self.kv.channel.run(self._fork(path))

    def close(self) -> None:
        """Ends an answer that is under way, writes what is pending, and closes the file; so does the end of `with`.

        >>> chat = sym.Chat(sym.kv_create())
        >>> chat.close()
        >>> chat.kv.closed
        True
        """
        self._cancel()
        self.kv.channel.run(self._close())

    def settle(self) -> None:
        """Ends an answer that is under way: file and `pending` are the conversation, as far as the program has read it.

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
            if not issubclass(kind, type(error)):  # else the caller has that error already
                log.warning("%s was not closed in order after %s: %s", self.kv.name, kind.__name__, error)
        finally:
            self.kv.close()


def last_turn(tokens: list[int], turns: Sequence[list[int]], vocabulary: Sequence[bytes]) -> int | None:
    """Where the last turn begins that begins as all of `turns` do; None: nowhere.

    The last token of what these have in common may be joined with a question in the file (two ends of lines are one
    token, often): the tokens before it are looked for, and then the text is compared.
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
    """Whether the text of `tokens` begins with all that the texts of `turns` have in common."""
    head = _in_common(turns)
    return _text(tokens[: len(head) + _JOINED_TOKENS], vocabulary).startswith(_text(head, vocabulary))


def _text(tokens: list[int], vocabulary: Sequence[bytes]) -> bytes:
    return b"".join(vocabulary[token] for token in tokens)


def _in_common(turns: Sequence[list[int]]) -> list[int]:
    """The tokens that all begin with."""
    shortest = min(turns, key=len)
    length = next((i for i, token in enumerate(shortest) if any(turn[i] != token for turn in turns)), len(shortest))
    return shortest[:length]
