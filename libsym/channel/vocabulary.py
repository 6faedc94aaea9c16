"""The bytes of each token. Each connection asks the daemon once."""

from __future__ import annotations

from array import array
from itertools import accumulate, pairwise

from libsym.abi import Op
from libsym.channel.client import ClientChannel
from libsym.channel.scripts import Call, Script
from libsym.errors import ProtocolError


def vocabulary_script(channel: ClientChannel) -> Script[list[bytes]]:
    """Return the bytes of all tokens. The first call on a connection asks the daemon. Do not change the list."""
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
