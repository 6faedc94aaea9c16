"""Text and tokens, by the model's own tokenizer; also text that arrives token by token."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from libsym.abi import TOKENIZE_SPECIAL, Op
from libsym.arguments import int32, utf8
from libsym.channel.scripts import Call, Script
from libsym.errors import Invalid
from libsym.faces import system_call

_REPLACEMENT = "\ufffd"
_MAX_HELD_CHARS = 64
"""Most replacement characters at the end that are an unfinished character; more are text that the model says."""
_WINDOW_TOKENS = 32
_CONTEXT_TOKENS = 8
_LONGEST_CHAR_BYTES = 4


@system_call
def tokenize(text: str, *, special: bool = True) -> Script[list[int]]:
    """The tokens of a text. `special`: special tokens spelled out in it (`<|im_end|>`) become what they stand for.

    Text of somebody else's that goes into a prompt should be tokenized with `special=False`: it cannot end a turn then.
    For messages there is `chat_tokens`.

    >>> sym.tokenize("Hi!")
    [72, 105, 33]
    """
    payload = utf8(text, "the text")
    reply = yield Call(Op.TOKENIZE, flags=TOKENIZE_SPECIAL if special else 0, payload=payload)
    return array("i", reply.payload).tolist()


@system_call
def detokenize(tokens: Iterable[int]) -> Script[str]:
    """The text of tokens. For tokens that come one by one, see `Detokenizer`.

    >>> sym.detokenize([72, 105, 33])
    'Hi!'
    """
    reply = yield Call(Op.DETOKENIZE, payload=int32(tokens, "token").tobytes())
    return reply.payload.decode("utf-8")


@system_call
def chat_template(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None = None,
    *,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> Script[str]:
    r"""A conversation as the model was trained to see it: `[{"role": "user", "content": "Hello"}]` and the like.

    For people: in this text the template's marks and those in messages look the same. `chat_tokens` tells them apart.
    `variables`: more that the template may ask for, such as `enable_thinking`.

    >>> sym.chat_template([{"role": "user", "content": "Hello"}])
    '<bos>user: Hello\nassistant: '
    """
    payload = _chat_form(messages, tools, variables, add_generation_prompt=add_generation_prompt)
    reply = yield Call(Op.CHAT_TEMPLATE, payload=payload)
    return reply.payload.decode("utf-8")


@system_call
def chat_tokens(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None = None,
    *,
    add_generation_prompt: bool = True,
    after_answer: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> Script[list[int]]:
    r"""The tokens of a conversation, in which messages and tools are text, whatever they spell out.

    Special tokens are those that the model's template writes: `<|im_end|>` in a message ends no turn. Without such
    marks in messages it is `tokenize(chat_template(...))`. A template that looks at a mark in a message, or changes
    it, is Invalid: the error names both.

    `after_answer`: the next turn of a conversation that is in a file already, behind the model's answer (whose end
    token is not in it): the tokens end that answer, and go on with these messages. What the template would write at the
    top of the conversation (tools, mostly) is Invalid: give it to the call that begins it.

    `variables`: as in `chat_template`. A mark in their texts is a mark.

    >>> sym.detokenize(sym.chat_tokens([{"role": "user", "content": "Hello"}]))
    '<bos>user: Hello\nassistant: '
    >>> 257 in sym.tokenize("<eos>"), 257 in sym.chat_tokens([{"role": "user", "content": "<eos>"}])
    (True, False)
    >>> sym.detokenize(sym.chat_tokens([{"role": "user", "content": "And?"}], after_answer=True))
    '\nuser: And?\nassistant: '
    """
    payload = _chat_form(
        messages, tools, variables, add_generation_prompt=add_generation_prompt, after_answer=after_answer
    )
    reply = yield Call(Op.CHAT_TOKENS, payload=payload)
    return array("i", reply.payload).tolist()


def _chat_form(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None,
    variables: Mapping[str, Any] | None,
    **options: bool,
) -> bytes:
    try:
        more = {} if variables is None else {"variables": dict(variables)}
        return json.dumps({"messages": list(messages), "tools": tools, **more, **options}).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise Invalid(f"messages, tools and variables must be what JSON can say: {error}") from error


Decoding = Generator[list[int], str, str]
"""Yields tokens, is sent their text; returns the text that is new."""


class TextWindow:
    """The last tokens of a text that grows, and how much of what they say was given out already.

    A token's text can depend on those before it (a leading space, the bytes of a character), so a window of the last
    tokens is detokenized each time and what is new at its end is given out. Who detokenizes, and how it waits for that,
    is the caller's affair.
    """

    def __init__(self) -> None:
        self._window: list[int] = []
        self._text = ""  # of the window
        self._num_given_chars = 0  # of that text

    def add(self, tokens: int | Iterable[int]) -> Decoding:
        """The text that one more token, or several, make certain."""
        self._window += int32((int(tokens),) if isinstance(tokens, (int, Integral)) else tokens, "token")
        self._text = yield self._window
        num_certain = len(self._text.rstrip(_REPLACEMENT))
        if len(self._text) - num_certain > _MAX_HELD_CHARS:
            num_certain = len(self._text)
        piece = self._text[self._num_given_chars : num_certain]
        self._num_given_chars = max(self._num_given_chars, num_certain)
        if self._num_given_chars == len(self._text) and len(self._window) > _WINDOW_TOKENS:
            yield from self._shorten()
        return piece

    @property
    def held(self) -> str:
        """Text that is kept back."""
        return self._text[self._num_given_chars :]

    def flush(self) -> str:
        """Return the text that was kept back; then the window is ready for a new text."""
        piece = self.held
        self._window, self._text, self._num_given_chars = [], "", 0
        return piece

    def _shorten(self) -> Generator[list[int], str, None]:
        """Forgets all but the last few tokens, beginning with a whole character if there is such a place."""
        for num_tokens in range(_CONTEXT_TOKENS, _CONTEXT_TOKENS + _LONGEST_CHAR_BYTES):
            context = self._window[-num_tokens:]
            self._text = yield context
            if not self._text.startswith(_REPLACEMENT):
                break
        self._window = context
        self._num_given_chars = len(self._text)


class Detokenizer:
    """Turns tokens into text as they come; what may be the beginning of a character is kept back until it is whole.

    The pieces together are the text of all tokens. One Detokenizer is for one text and one thread.

    >>> text = sym.Detokenizer()
    >>> [text.add(token) for token in sym.tokenize("né")]
    ['n', '', 'é']
    """

    def __init__(self, decode: Callable[[list[int]], str] = detokenize) -> None:
        """`decode` turns a list of tokens into text; without it the daemon does."""
        self._decode = decode
        self._window = TextWindow()

    def __repr__(self) -> str:
        return f"<Detokenizer: {self._window.held!r} held back>"

    def add(self, tokens: int | Iterable[int]) -> str:
        """The text that one more token, or several, make certain; often a word, sometimes nothing.

        >>> text = sym.Detokenizer()
        >>> text.add(72), text.add([105, 33])
        ('H', 'i!')
        """
        steps = self._window.add(tokens)
        try:
            wanted = next(steps)
            while True:
                wanted = steps.send(self._decode(wanted))
        except StopIteration as stop:
            return str(stop.value)

    def flush(self) -> str:
        """Return the text that was kept back; then the Detokenizer is ready for a new text.

        >>> text = sym.Detokenizer()
        >>> text.add(sym.tokenize("é")[0]), text.flush()
        ('', '�')
        """
        return self._window.flush()
