"""The bytes that each token of the model stands for."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from itertools import accumulate, pairwise

from libsym.abi import Op
from libsym.channel.client import ClientChannel
from libsym.channel.process import process
from libsym.channel.scripts import Call, Script
from libsym.errors import ProtocolError
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


def vocabulary_script(channel: ClientChannel) -> Script[list[bytes]]:
    """In as many messages as it takes. The list is the connection's: it is not to be changed."""
    if channel.vocabulary is None:
        found: list[bytes] = []
        total = 1
        while len(found) < total:
            reply = yield Call(Op.VOCABULARY, args=(len(found), 0, 0, 0))
            count, total = reply.args[:2]
            lengths = array("I", reply.payload[: 4 * count])
            if count < 1 or len(reply.payload) != 4 * count + sum(lengths):
                raise ProtocolError(f"the daemon sent {len(reply.payload)} bytes for {count} tokens")
            ends = accumulate(lengths, initial=4 * count)
            found += [reply.payload[begin:end] for begin, end in pairwise(ends)]
        channel.vocabulary = found
    return channel.vocabulary
