"""The bytes that each token of the model stands for."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from libsym.channel.client import ClientChannel
from libsym.channel.process import process
from libsym.channel.scripts import Script
from libsym.channel.vocabulary import vocabulary_script
from libsym.rows.token_set import TokenSet


def vocabulary() -> list[bytes]:
    """The bytes of each token, by its number: perhaps a part of a character; empty for one that stands for no text.

    >>> sym.vocabulary()[65]
    b'A'

    They are asked for once for each connection.
    """
    channel = process.channel()
    return list(channel.run(vocabulary_script(channel)))


def token_set(wanted: Iterable[int] | Callable[[bytes], bool]) -> TokenSet:
    """Tokens of the model, as a set: those of these numbers, or those whose bytes a function says yes to.

    >>> digits, letter = sym.token_set(bytes.isdigit), sym.token_set([65])
    >>> len(digits), 65 in digits | letter, len(~digits)
    (10, True, 249)
    """
    channel = process.channel()
    return channel.run(token_set_script(channel, wanted))


def token_set_script(channel: ClientChannel, wanted: Iterable[int] | Callable[[bytes], bool]) -> Script[TokenSet]:
    texts = yield from vocabulary_script(channel)
    tokens = (token for token, text in enumerate(texts) if wanted(text)) if callable(wanted) else wanted
    return TokenSet(tokens, len(texts))
