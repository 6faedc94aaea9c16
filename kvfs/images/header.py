"""Reads the header of an image. Any user may have written the header, so no part of it is trusted.

The header must equal this model's own header for the number of entries that it claims. So nothing needs interpretation:
the shape of `tokens` gives that number, and everything else is computed from it and compared. The order of the checks
gives the most helpful message: an image of another model gives an error about its model.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Protocol

from kvfs.images.format import (
    FORMAT_NAME,
    FORMAT_VERSION,
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    TENSORS,
    ImageFormat,
    ImageLayout,
)
from kvfs.pages.turns import TURNS_BYTES, turns_within, without_padding
from libsym.errors import Invalid

_DIGEST = re.compile(r"[0-9a-f]{64}")
_TURNS = re.compile(rf"[0-9a-f]{{{2 * TURNS_BYTES}}}")
_SHOWN_CHARACTERS = 12
"""Characters of a fingerprint in messages: enough to tell two fingerprints apart."""


class ByteSource(Protocol):
    """A file from which an image is imported. The file's content may change during the import."""

    def read_into(self, offset: int, room: memoryview) -> int:
        """Read into `room` as `preadv(2)` does. Return how many bytes were read."""
        ...

    @property
    def size(self) -> int: ...

    def read_at(self, offset: int, size: int) -> bytes:
        """Read as `pread(2)` does. The result is shorter than `size` only at the end of the source."""
        ...


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """Plan of an import, from a valid header: the shape of the image, and the digest that its content must have."""

    image_format: ImageFormat
    layout: ImageLayout
    digest: str
    turns: bytes = b""
    """Records of where turns of a conversation begin: see `kvfs.pages.turns`."""

    @property
    def num_entries(self) -> int:
        return self.layout.num_entries

    @property
    def num_pages(self) -> int:
        return self.layout.num_pages


def parse_header(image_format: ImageFormat, source: ByteSource) -> ImagePlan:
    """Check everything that a header can show, against this model and the source's size. Raise Invalid if the header is
    wrong.

    At most 64 KiB are read. A valid header takes well under a millisecond.
    """
    size = source.size
    text = _read_text(source, size)
    header = _parse_json(text)
    image_format, digest, turns = _check_metadata(image_format, header.pop("__metadata__", None))
    if LENGTH_BYTES + len(text) != image_format.data_start:
        raise Invalid(f"image's data begins at {LENGTH_BYTES + len(text)}, not at {image_format.data_start}")
    if tuple(header) != TENSORS:
        raise Invalid(f"image holds tensors {_shown(', '.join(header), 60)} instead of {', '.join(TENSORS)}")
    num_entries = _claimed_entries(header["tokens"], size)
    for name, wanted in image_format.tensor_table(num_entries).items():
        if not _same(header[name], wanted):
            raise Invalid(f"image's tensor {name} does not fit {num_entries} entries of this model")
    layout = image_format.layout(num_entries)
    if size != layout.size:
        wrong = "cut short" if size < layout.size else "too long"
        raise Invalid(f"image is {wrong}: {size} bytes, {num_entries} entries need {layout.size}")
    return ImagePlan(image_format, layout, digest, turns_within(turns, num_entries))


def read_exactly(source: ByteSource, offset: int, size: int) -> bytes:
    """Return the bytes at `offset`, or raise Invalid if the source has shrunk meanwhile."""
    data = source.read_at(offset, size)
    if len(data) != size:
        raise Invalid(f"image is cut short: {len(data)} of {size} bytes at offset {offset}")
    return data


def _read_text(source: ByteSource, size: int) -> bytes:
    if size < LENGTH_BYTES:
        raise Invalid(f"image is cut short: {size} bytes can't hold a header")
    length = int.from_bytes(read_exactly(source, 0, LENGTH_BYTES), "little")
    if length > MAX_HEADER_BYTES:
        raise Invalid(f"image has a header of {length} bytes; {MAX_HEADER_BYTES} is the most there may be")
    if size < LENGTH_BYTES + length:
        raise Invalid(f"image is cut short: {size} bytes, its header alone has {LENGTH_BYTES + length}")
    return read_exactly(source, LENGTH_BYTES, length)


def _parse_json(text: bytes) -> dict[str, object]:
    try:
        header = json.loads(text.decode(), object_pairs_hook=_no_duplicates, parse_constant=_no_constants)
    except (ValueError, RecursionError) as error:  # RecursionError: brackets nested by the thousand
        raise Invalid(f"image's header is no JSON: {_shown(str(error), 60)}") from None
    if type(header) is not dict or not text.startswith(b"{"):
        raise Invalid("image's header is no JSON object")
    return header


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key occurs twice")
    return result


def _no_constants(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _check_metadata(image_format: ImageFormat, metadata: object) -> tuple[ImageFormat, str, bytes]:
    """Compare the metadata with the metadata that this daemon writes. Return the image's format, digest and turns."""
    if type(metadata) is not dict or not all(type(value) is str for value in metadata.values()):
        raise Invalid("image has no metadata: it was not written by Symphony")
    theirs: dict[str, str] = dict(metadata)
    name, version = theirs.pop("format", ""), theirs.pop("version", "")
    if name != FORMAT_NAME:
        raise Invalid(f"image is of format {_shown(name)}, not {FORMAT_NAME}")
    if version not in {"1", FORMAT_VERSION}:
        raise Invalid(
            f"image is of format version {_shown(version)} (this daemon reads versions 1 and {FORMAT_VERSION})"
        )
    image_format = ImageFormat(image_format.facts, version)
    digest = theirs.pop("digest", "")
    if not _DIGEST.fullmatch(digest):
        raise Invalid("image has no digest")
    turns = theirs.pop("turns", "") if image_format.has_turns else "00" * TURNS_BYTES
    if not _TURNS.fullmatch(turns):
        raise Invalid("image has no list of turns")
    for key, ours in image_format.identity.items():
        if theirs.get(key) != ours:
            raise Invalid(
                f"image is of {key} {_shown(theirs.get(key, 'unknown'))} (this daemon runs {_shown(ours)}): "
                "it can't be used here"
            )
    unknown = theirs.keys() - image_format.identity.keys()
    if unknown:
        raise Invalid(f"image's metadata has an unknown key {_shown(min(unknown))}")
    return image_format, digest, without_padding(bytes.fromhex(turns))


def _claimed_entries(tokens: object, size: int) -> int:
    shape = tokens.get("shape") if type(tokens) is dict else None
    if type(shape) is not list or len(shape) != 1 or type(shape[0]) is not int or shape[0] < 0:
        raise Invalid("image's tensor tokens has no shape [n]")
    num_entries: int = shape[0]
    if num_entries > size:  # checked before arithmetic and messages, because the number may have thousands of digits
        raise Invalid(f"image is cut short: {size} bytes can't hold the entries it claims")
    return num_entries


def _same(theirs: object, ours: object) -> bool:
    """Return whether two values of JSON are equal. The integer 1 equals neither 1.0 nor true."""
    if type(theirs) is not type(ours):
        return False
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return theirs.keys() == ours.keys() and all(_same(theirs[key], value) for key, value in ours.items())
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(theirs) == len(ours) and all(map(_same, theirs, ours))
    return theirs == ours


def _shown(text: str, characters: int = _SHOWN_CHARACTERS) -> str:
    """Return the beginning of an untrusted text, in a form that fits one line of a message."""
    cut = text if len(text) <= characters else text[:characters] + "…"
    return "".join(character if character.isprintable() else "?" for character in cut)
