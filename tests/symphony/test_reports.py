"""What the commands print, from what the daemon answers."""

from __future__ import annotations

from typing import Any

from symphony.reports import du_lines


def row(path: str, exclusive: int | None, shared: int | None, tokens: int = 0, plain_bytes: int = 0) -> dict[str, Any]:
    return {
        "path": path,
        "tokens": tokens,
        "exclusive_pages": exclusive,
        "shared_pages": shared,
        "plain_bytes": plain_bytes,
    }


def test_du_shows_bytes_of_both_kinds_of_files_and_a_dash_for_what_is_not_told() -> None:
    rows = [row("./a.kv", 2, 1, 70), row("./b.txt", 0, 0, plain_bytes=1500), row("./theirs.kv", None, None, 40)]
    usage = {"rows": rows, "total": row(".", 2, 1, 110, 1500)}
    assert du_lines(usage, 4096) == [
        "EXCLUSIVE  SHARED   TOKENS  PATH",
        "     8.0K    4.0K       70  ./a.kv",
        "     1.5K       0        0  ./b.txt",
        "        -       -       40  ./theirs.kv",
        "     9.5K    4.0K      110  total",
    ]
