"""File names of conversations. The name of a conversation may be any text."""

from __future__ import annotations

import re
from hashlib import sha256
from urllib.parse import unquote

from lips.gateway.errors import ApiError

ATTRIBUTE = "user.gateway.name"
"""Extended attribute with the whole name of the conversation, for files whose name is cut."""
MAX_NAME_BYTES = 4096
_MAX_FILE_BYTES = 200
"""Maximum bytes of a file's name before its suffix. The gateway's temporary files beside it have longer names."""
_HASH_CHARS = 16
_CUT = re.compile(rf"~[0-9a-f]{{{_HASH_CHARS}}}$")
_ENCODED = re.compile(r"[/%\x00-\x1f\x7f]|^\.")


def file_name(name: str) -> str:
    """Return the name of a conversation's file, without its suffix.

    Slashes, control bytes, `%` and a leading dot are escaped, as in `%2F`. A name that is too long is cut, and ends
    with a hash of the whole name.
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
    """Return whether a file's name is cut, so that an attribute has the whole name of its conversation."""
    return _CUT.search(stem) is not None


def conversation_name(stem: str) -> str:
    """Return the conversation's name for a file name; the file name itself if `file_name` would not produce it."""
    name = unquote(stem)
    return name if name and not is_cut(stem) and file_name(name) == stem else stem
