"""The bytes of each token of the model, and sets of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from libsym.channel.client import ClientChannel
from libsym.channel.process import process
from libsym.channel.scripts import Script
from libsym.channel.vocabulary import vocabulary_script
from libsym.rows.token_set import TokenSet


def vocabulary() -> list[bytes]:
    """Return the bytes of each token, by its id. The bytes may be a part of a character. A token without text has none.

    >>> sym.vocabulary()[65]
    b'A'

    The first call on a connection asks the daemon; later calls do not.
    """
    channel = process.channel()
    return list(channel.run(vocabulary_script(channel)))


def token_set(wanted: Iterable[int] | Callable[[bytes], bool]) -> TokenSet:
    """Return a set of tokens of the model, from their ids or from a function that accepts a token's bytes.

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
