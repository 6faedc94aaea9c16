"""Small HTML tables, which a notebook shows in place of a repr."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from libsym.channel.process import process
from libsym.channel.vocabulary import vocabulary_script
from libsym.errors import SymError

SHOWN_TOKENS = 10
_BAR_PX = 160
_CELL = "padding:1px 8px;text-align:left"
_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"})
"""The same replacements as in html.escape, whose module takes 2 ms to import."""


def token_table(
    caption: str, scored: Iterable[tuple[int, float]], vocab_size: int | None = None, *, drawn: int | None = None
) -> str:
    """Return a table of tokens with their text, probability and a bar; `scored` has log-probabilities."""
    texts = _texts(vocab_size)
    rows = []
    for token, logprob in scored:
        probability = math.exp(logprob)
        bar = (
            f'<div style="width:{_BAR_PX * min(probability, 1):.0f}px;height:0.7em;background:currentColor;'
            'opacity:0.45"></div>'
        )
        text = "" if texts is None or token >= len(texts) else text_of(texts[token])
        name = f"{token}, drawn" if token == drawn else str(token)
        rows.append((f"<code>{text.translate(_ESCAPES)}</code>", name, f"{probability:.2%}", bar))
    return _table(caption, rows)


def likeliest_tokens(scored: Iterable[tuple[int, float]], vocab_size: int) -> str:
    """Return one line of tokens with their probabilities. A token is shown by its text, or by its id if it has none."""
    texts = _texts(vocab_size)
    return ", ".join(
        f"{token if texts is None else text_of(texts[token])} {math.exp(logprob):.2%}" for token, logprob in scored
    )


def fact_table(caption: str, facts: Iterable[tuple[str, str]]) -> str:
    """Return a table of facts: names with their values."""
    return _table(caption, [(name.translate(_ESCAPES), value.translate(_ESCAPES)) for name, value in facts])


def text_of(text: bytes) -> str:
    """Return a token's text in quotes, so that blanks show. A part of a character is shown as its bytes."""
    if not text:
        return "(no text)"
    try:
        return repr(text.decode())
    except UnicodeDecodeError:
        return repr(text)


def _table(caption: str, rows: Iterable[Sequence[str]]) -> str:
    body = "".join("<tr>" + "".join(f'<td style="{_CELL}">{cell}</td>' for cell in row) + "</tr>" for row in rows)
    return (
        f'<div>{caption.translate(_ESCAPES)}</div><table style="border-collapse:collapse"><tbody>{body}</tbody></table>'
    )


def _texts(vocab_size: int | None) -> list[bytes] | None:
    """Return the bytes of each token. None: this process has no connection, or its model has another vocabulary."""
    channel = process.connected
    if channel is None:
        return None
    try:
        texts = channel.run(vocabulary_script(channel))
    except SymError:
        return None  # the daemon is gone; the table still has its numbers
    return texts if vocab_size in (None, len(texts)) else None
