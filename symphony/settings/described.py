"""Text that is made from the table of settings: the file that is installed, and the list of keys in symphony.toml(5).

`python -m symphony.settings.described` prints the file. With the path of the manual page, it updates the list there.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

from symphony.settings.config import SETTINGS, Setting
from symphony.settings.kinds import WEIGHTS

_HEAD = """\
# The configuration of Symphony's daemon: symphony-serve(1) describes each key.
# A key with a # in front has its default, or shows an example. Check a change with `symphony config check`, then
# `systemctl reload symphony`: keys marked (reload) change immediately, other keys with the next start.
"""
_LIST = re.compile(r"(?<=\n\.SH KEYS\n).*?(?=\.SH )", re.DOTALL)


def shipped_file() -> str:
    """Return the text of the file that is installed. Every key is commented out, with its default."""
    parts = [_HEAD]
    for key, setting in sorted(SETTINGS.items(), key=lambda item: item[1].kind is WEIGHTS):  # a table must be last
        words = f"{'(reload) ' * setting.reload}{_sentences(setting, ' ')}"
        comment = textwrap.wrap(words, 120, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
        value = setting.default if setting.example is None else setting.example
        if setting.kind is WEIGHTS:
            comment.append("# A table: all lines after its heading belong to the table, so it is last.")
            lines = [f"#[{key}]", *(f"#{user} = {_plain(weight)}" for user, weight in value.items())]
        else:
            lines = [f"#{key} = {_plain(value)}"]
        parts.append("\n".join([*comment, *lines]) + "\n")
    return "\n".join(parts)


def list_of_keys() -> str:
    """Return the list of keys in roff."""
    lines = list[str]()
    for key, setting in SETTINGS.items():
        default = "" if setting.otherwise else f"; default {_plain(setting.default).removesuffix('.0')}"
        about = f"{setting.kind.name}{default}{'; reload' * setting.reload}".replace('"', r"\(dq")
        name = f"[{key}]" if setting.kind is WEIGHTS else key
        lines += [".TP", f'.BR {name} " ({about})"', _sentences(setting, "\n")]
    return "\n".join(lines) + "\n"


def _sentences(setting: Setting, between: str) -> str:
    return f"{setting.about()}.{f'{between}Default: {setting.otherwise}.' if setting.otherwise else ''}"


def _plain(value: Any) -> str:
    return json.dumps(value, default=str)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        page = Path(sys.argv[1])
        page.write_text(_LIST.sub(lambda _: list_of_keys(), page.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(shipped_file(), end="")
