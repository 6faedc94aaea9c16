"""Operations on texts: tokenize, detokenize, chat templates, and the vocabulary. Long work is done in workers."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Protocol
from weakref import WeakValueDictionary

import numpy as np
import trio

from libsym.abi import TOKENIZE_SPECIAL, Op
from libsym.channel.server import PAYLOAD_BYTES, Request
from libsym.errors import Invalid
from scheduler.connection.lip import MAX_LATER, Lip
from scheduler.connection.system_call import SystemCall
from scheduler.operations.appending import ModelLimits
from scheduler.operations.operation import Operation, Table
from scheduler.wire.payloads import check_range, json_of, text_of
from scheduler.wire.replies import Reply

SHORT_TEXT_BYTES = 2048
"""Maximum number of bytes of a text that is tokenized on the trio thread (about 0.2 ms). Workers take longer texts."""
NUM_WORKERS = 2
"""Workers for long texts. A user gets at most one worker. More workers would take the cores and the interpreter's lock
from other work.
"""
AT_ONCE = 8192
"""Maximum number of tokens that one call into C converts. The call holds the interpreter's lock for 0.2 ms."""
MAX_CHAT_TEXTS = 20_000
MAX_CHAT_OTHER_BYTES = 64 << 10
"""Maximum number of bytes of a chat's JSON outside its texts: enough for some thousands of messages. At worst, parsing
holds the interpreter's lock for 20 ms."""


class TextModel(ModelLimits, Protocol):
    """The model's tokenizer, templates and limits, for operations."""

    @property
    def eos_ids(self) -> frozenset[int]: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    def own_encoder(self) -> Callable[[str], list[int]]:
        """Return a function that encodes text and does not recognise special tokens."""
        ...

    def encode(self, text: str, *, special: bool) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def chat_template(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str: ...

    def chat_tokens(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        *,
        add_generation_prompt: bool,
        after_answer: bool,
        variables: Mapping[str, Any],
        checkpoint: Callable[[], None],
    ) -> list[int]:
        """Tokenize a chat. `checkpoint` is called before each rendering. An exception from it ends the call."""
        ...

    def info(self) -> dict[str, Any]:
        """Return the facts for `model_info()`."""
        ...


Answer = Callable[[TextModel, Request], Reply]


class Texts:
    """Answers TOKENIZE, DETOKENIZE, CHAT_TEMPLATE, CHAT_TOKENS and VOCABULARY."""

    def __init__(self, text_of_lip: Callable[[Lip], TextModel]) -> None:
        """`text_of_lip` returns the text of a connection's model."""
        self._text_of = text_of_lip
        self._workers = trio.CapacityLimiter(NUM_WORKERS)
        self._limiters: WeakValueDictionary[int, trio.CapacityLimiter] = WeakValueDictionary()
        """A limiter for each uid with a text in a worker, or with a text that waits for a worker."""

    def table(self) -> Table:
        def quick(answer: Answer) -> Operation:
            return Operation(partial(self._at_once_if_short, answer), max_waiting=MAX_LATER)

        return {
            Op.TOKENIZE: quick(self._tokenize),
            Op.DETOKENIZE: quick(self._detokenize),
            Op.CHAT_TEMPLATE: quick(self._chat_template),
            Op.CHAT_TOKENS: Operation(partial(self._in_worker, self._chat_tokens), max_waiting=MAX_LATER),
            Op.VOCABULARY: Operation(self._vocabulary, takes_payload=False, max_waiting=MAX_LATER),
        }

    def _at_once_if_short(self, answer: Answer, call: SystemCall) -> Reply | Coroutine[Any, Any, Reply]:
        if len(call.request.payload) <= SHORT_TEXT_BYTES:
            return answer(self._text_of(call.lip), call.request)
        return self._in_worker(answer, call)

    def _in_worker(self, answer: Answer, call: SystemCall) -> Coroutine[Any, Any, Reply]:
        limiter = self._limiters.setdefault(call.lip.uid, trio.CapacityLimiter(1))
        return self._one_at_a_time(limiter, answer, self._text_of(call.lip), call.request)

    async def _one_at_a_time(
        self, limiter: trio.CapacityLimiter, answer: Answer, text: TextModel, request: Request
    ) -> Reply:
        async with limiter:
            return await trio.to_thread.run_sync(answer, text, request, limiter=self._workers)

    @staticmethod
    def _tokenize(text: TextModel, request: Request) -> Reply:
        return _packed(text.encode(text_of(request), special=bool(request.flags & TOKENIZE_SPECIAL)))

    @staticmethod
    def _detokenize(text: TextModel, request: Request) -> Reply:
        if len(request.payload) % 4:
            raise Invalid("detokenize() takes 32-bit token ids")
        tokens = np.frombuffer(request.payload, np.int32)
        check_range("token", tokens, text.vocab_size, "the vocabulary")
        return Reply((), text.decode(array("i", request.payload)).encode())

    @staticmethod
    def _chat_template(text: TextModel, request: Request) -> Reply:
        form = _chat_form(request)
        chat = text.chat_template(
            form["messages"],
            form.get("tools"),
            add_generation_prompt=bool(form.get("add_generation_prompt", True)),
            variables=form.get("variables") or {},
        )
        try:
            return Reply((), chat.encode())
        except UnicodeEncodeError:
            raise Invalid("chat_template(): the messages have half a surrogate pair in them, no Unicode text") from None

    @staticmethod
    def _chat_tokens(text: TextModel, request: Request) -> Reply:
        """Tokenize a chat in a worker, because the template may run several times."""
        form = _chat_form(request)
        tokens = text.chat_tokens(
            form["messages"],
            form.get("tools"),
            add_generation_prompt=bool(form.get("add_generation_prompt", True)),
            after_answer=bool(form.get("after_answer", False)),
            variables=form.get("variables") or {},
            checkpoint=trio.from_thread.check_cancelled,  # raises if the call is cancelled, or if its program has ended
        )
        return _packed(tokens)

    def _vocabulary(self, call: SystemCall) -> Coroutine[Any, Any, Reply]:
        return trio.to_thread.run_sync(self._window, self._text_of(call.lip).token_texts, call.request.args[0])

    @staticmethod
    def _window(texts: Sequence[bytes], first: int) -> Reply:
        """Return the bytes of the tokens from `first` on, for as many tokens as fit a message."""
        if not 0 <= first < len(texts):
            raise Invalid(f"token {first} is out of range: the vocabulary has 0 to {len(texts) - 1}")
        lengths = np.fromiter(map(len, texts[first:]), np.uint32)
        count = int(np.searchsorted(np.cumsum(lengths + 4, dtype=np.int64), PAYLOAD_BYTES, "right"))
        payload = lengths[:count].tobytes() + b"".join(texts[first : first + count])
        return Reply((count, len(texts)), payload)


def _packed(tokens: list[int]) -> Reply:
    """Return the reply with these tokens, and empty the list. One call converts, or frees, at most AT_ONCE tokens."""
    count, parts = len(tokens), list[bytes]()
    while tokens:
        parts.append(np.asarray(tokens[-AT_ONCE:], np.int32).tobytes())
        del tokens[-AT_ONCE:]
    return Reply((count,), b"".join(reversed(parts)))


def _chat_form(request: Request) -> dict[str, Any]:
    form = json_of(request, request.payload, max_texts=MAX_CHAT_TEXTS, max_other_bytes=MAX_CHAT_OTHER_BYTES)
    if not isinstance(form, dict) or not isinstance(form.get("messages"), list):
        raise Invalid(f"{request.op.name.lower()}() takes a list of messages")
    if not isinstance(form.get("variables", {}), dict):
        raise Invalid(f"{request.op.name.lower()}() takes variables as an object")
    return form
