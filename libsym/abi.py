"""Numbers that both sides of the system-call boundary share; `abi.h` is the same in C, and a test compares them."""

from __future__ import annotations

from enum import IntEnum

PAGE_ENTRIES = 32
"""Entries in a page. One number for every tier, file and kernel: changing it changes the image format."""

MAGIC = 0x314D5953
ABI_VERSION = 4

RING_BYTES = 2 << 20
MAX_FRAME_BYTES = 1 << 20
FRAME_ALIGN = 64
HEADER_BYTES = 64
"""Of a request and of a reply, in front of the payload."""


class Op(IntEnum):
    """What a request asks for."""

    KV_CREATE = 1
    KV_OPEN = 2
    KV_CLOSE = 3
    KV_FORK = 4
    KV_REMOVE = 5
    KV_TRUNCATE = 6
    KV_STAT = 7
    KV_LIST = 8
    KV_RENAME = 9
    KV_CHMOD = 10
    KV_READ = 11
    KV_DU = 12
    PRED = 13
    TOKENIZE = 14
    DETOKENIZE = 15
    CHAT_TEMPLATE = 16
    MODEL_INFO = 17
    STAT = 18
    PING = 19
    KV_EXTRACT = 20
    KV_MERGE = 21
    KV_LOCK = 22
    KV_UNLOCK = 23
    CHECK = 24
    CONFINE = 25
    PRED_BATCH = 26
    GENERATE = 27
    CANCEL = 28
    SEND = 29
    RECV = 30
    SUBSCRIBE = 31
    UNSUBSCRIBE = 32
    GETRUSAGE = 33
    KV_ADVISE = 34
    KV_SYNC = 35
    VOCABULARY = 36
    KV_CLAIM = 37
    KV_NAME = 38
    KV_MKDIR = 39
    CHAT_TOKENS = 40


ROWS_NONE = 1
"""PRED: append without asking for a distribution."""
ROWS_LAST = 2
"""PRED: the distribution after the last token."""
ROWS_ALL = 4
"""PRED: one distribution after every token."""

MASKED = 8
"""PRED: with a mask over the entries before."""
REDUCED = 16
"""PRED: rows are answered by numbers in the reply, not by result slots."""

MORE = 1
"""Of a reply: others to the same request follow."""


class MessageKind(IntEnum):
    """SEND, RECV: what the data are."""

    TEXT = 0
    BYTES = 1
    JSON = 2


class Advice(IntEnum):
    """KV_ADVISE: what to do with the pages of a file."""

    PIN = 1
    UNPIN = 2
    COLD = 3
    WILLNEED = 4
    TTL = 5
    PRIORITY = 6


class Finish(IntEnum):
    """GENERATE: why it ended."""

    LENGTH = 1
    STOP_TOKEN = 2
    STOP_TEXT = 3
    GRAMMAR = 4
    CANCELLED = 5


OPEN_WRITE = 1
"""KV_OPEN, KV_CLAIM, KV_NAME: for appending and truncating, not only for reading and forking."""

TOKENIZE_SPECIAL = 1
"""TOKENIZE: special tokens that are spelled out in the text become one token each."""

REBASE = 1
"""KV_EXTRACT, KV_MERGE: entries get positions from 0 on."""

RANGE_END = (1 << 63) - 1
"""KV_EXTRACT: as the end of a range: where the file ends."""

LOCK_SHARED = 1
"""KV_LOCK: together with others that share it."""
LOCK_NOWAIT = 2
"""KV_LOCK: fail with EWOULDBLOCK rather than wait."""
