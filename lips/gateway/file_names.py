"""Between the names of conversations, which may be any text, and those of their files."""

from __future__ import annotations

import re
from hashlib import sha256
from urllib.parse import unquote

from lips.gateway.errors import ApiError

ATTRIBUTE = "user.gateway.name"
"""Extended attribute of a file whose name is cut: the whole name of the conversation."""
MAX_NAME_BYTES = 4096
_MAX_FILE_BYTES = 200
"""Of the name of a file before its suffix: the gateway writes others beside it, which are longer."""
_HASH_CHARS = 16
_CUT = re.compile(rf"~[0-9a-f]{{{_HASH_CHARS}}}$")
_ENCODED = re.compile(r"[/%\x00-\x1f\x7f]|^\.")


def file_name(name: str) -> str:
    """Return the name of a conversation's file, without its suffix.

    Slashes, control bytes, `%` and a dot in front are written as `%2F`. A name that is too long is cut, and ends in a
    hash of the whole.
    """
    num_bytes = len(name.encode(errors="surrogatepass"))
    if not 1 <= num_bytes <= MAX_NAME_BYTES:
        raise ApiError(400, f"{name[:40]!r} names no conversation: 1 to {MAX_NAME_BYTES} bytes are expected")
    found = _ENCODED.sub(lambda match: f"%{ord(match[0]):02X}", name)
    encoded = found.encode(errors="surrogatepass")
    if len(encoded) <= _MAX_FILE_BYTES and not _CUT.search(found):
        return found
    most = _MAX_FILE_BYTES - _HASH_CHARS - 1
    digest = sha256(name.encode(errors="surrogatepass")).hexdigest()[:_HASH_CHARS]
    return f"{encoded[:most].decode(errors='ignore')}~{digest}"


def is_cut(stem: str) -> bool:
    """Whether the whole name of a conversation is an attribute of its file."""
    return _CUT.search(stem) is not None


def conversation_name(stem: str) -> str:
    """Return the conversation of a file's name. A name that no rule of today gives is its own."""
    name = unquote(stem)
    return name if name and not is_cut(stem) and file_name(name) == stem else stem
