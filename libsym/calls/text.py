"""Conversion between text and tokens by the model's own tokenizer, also token by token."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from libsym.abi import TOKENIZE_SPECIAL, Op
from libsym.arguments import int32, utf8
from libsym.calls.faces import system_call
from libsym.channel.scripts import Call, Script
from libsym.errors import Invalid

_REPLACEMENT = "\ufffd"
_MAX_HELD_CHARS = 64
"""Largest number of replacement characters that an unfinished character at the end can give. More replacement
characters are real text.
"""
_WINDOW_TOKENS = 32
_CONTEXT_TOKENS = 8
_LONGEST_CHAR_BYTES = 4


@system_call
def tokenize(text: str, *, special: bool = True) -> Script[list[int]]:
    """Return the tokens of a text. `special`: the spelling of a special token (`<|im_end|>`) becomes that token.

    Use `special=False` for untrusted text in a prompt, so that it cannot end a turn. For messages, use `chat_tokens`.

    >>> sym.tokenize("Hi!")
    [72, 105, 33]
    """
    payload = utf8(text, "the text")
    reply = yield Call(Op.TOKENIZE, flags=TOKENIZE_SPECIAL if special else 0, payload=payload)
    return array("i", reply.payload).tolist()


@system_call
def detokenize(tokens: Iterable[int]) -> Script[str]:
    """Return the text of tokens. For tokens that arrive one by one, see `Detokenizer`.

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
    r"""Return the text of a conversation, by the model's chat template.

    `messages`: mappings such as `{"role": "user", "content": "Hello"}`. `variables`: further variables of the template,
    such as `enable_thinking`. The text is for people to read: marks of the template and marks inside messages look the
    same in it. For a prompt, use `chat_tokens`, which tells them apart.

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
    r"""Return the tokens of a conversation, by the model's chat template. Messages and tools are plain text.

    Only the template writes special tokens: `<|im_end|>` inside a message ends no turn. If no message contains such a
    mark, the result is `tokenize(chat_template(...))`. Invalid: the template reads or changes a mark inside a message;
    the error names both.

    `after_answer`: return only the next turn, for a file that ends with the model's answer without its end token. The
    tokens end that answer and continue with these messages. Invalid: an argument belongs to the top of the
    conversation, such as tools. Give it to the call that begins the conversation.

    `variables`: as in `chat_template`. Marks inside the texts of variables become special tokens.

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
"""Generator that yields tokens, receives the text of these tokens, and returns the text that is new."""


class TextWindow:
    """The last tokens of a growing text, and the number of characters of their text that were returned.

    A token's text can depend on the tokens before it (a leading space, the bytes of a character). So a window of the
    last tokens is detokenized each time, and the new text at its end is returned. `add` returns a generator that yields
    tokens. The caller detokenizes them and sends their text back.
    """

    def __init__(self) -> None:
        self._window: list[int] = []
        self._text = ""  # text of the window
        self._num_given_chars = 0  # number of characters of `_text` that were returned

    def add(self, tokens: int | Iterable[int]) -> Decoding:
        """Add one token or several, and return the text that no later token changes."""
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
        """The text that is held back, because a later token may change it."""
        return self._text[self._num_given_chars :]

    def flush(self) -> str:
        """Return the text that was held back, and make the window ready for a new text."""
        piece = self.held
        self._window, self._text, self._num_given_chars = [], "", 0
        return piece

    def _shorten(self) -> Generator[list[int], str, None]:
        """Forget all but the last few tokens. The remaining tokens begin with a whole character, if possible."""
        for num_tokens in range(_CONTEXT_TOKENS, _CONTEXT_TOKENS + _LONGEST_CHAR_BYTES):
            context = self._window[-num_tokens:]
            self._text = yield context
            if not self._text.startswith(_REPLACEMENT):
                break
        self._window = context
        self._num_given_chars = len(self._text)


class Detokenizer:
    """Converter of tokens into text, as the tokens arrive. The bytes of a character are held back until it is whole.

    All pieces joined are the text of all tokens. Use one Detokenizer for one text and one thread.

    >>> text = sym.Detokenizer()
    >>> [text.add(token) for token in sym.tokenize("né")]
    ['n', '', 'é']
    """

    def __init__(self, decode: Callable[[list[int]], str] = detokenize) -> None:
        """Make a Detokenizer. `decode` converts a list of tokens into text; by default the daemon converts them."""
        self._decode = decode
        self._window = TextWindow()

    def __repr__(self) -> str:
        return f"<Detokenizer: {self._window.held!r} held back>"

    def add(self, tokens: int | Iterable[int]) -> str:
        """Add one token or several, and return the new text that no later token changes: often a word, or nothing.

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
        """Return the text that was held back, and make the Detokenizer ready for a new text.

        >>> text = sym.Detokenizer()
        >>> text.add(sym.tokenize("é")[0]), text.flush()
        ('', '�')
        """
        return self._window.flush()
