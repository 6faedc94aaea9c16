"""A daemon that starts over a damaged state: it says what to do, or serves what is right."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import trio

from libsym.errors import SymError
from tests.kvfs.durable.damage import DAMAGES, PLAIN, TOKENS, Damage
from tests.kvfs.durable.house import ROOT, House, running


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
def test_without_fsck_a_daemon_refuses_or_gives_what_is_right(
    damage: Damage, state: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damage.plant(state)

    async def look() -> dict[str, int | None]:
        """What was wrong with files: an errno, or None, they were not there."""
        wrong: dict[str, int | None] = {}
        async with running(House(state)) as house:
            for path in list(TOKENS)[1:]:
                if path not in house.names():
                    wrong[path] = None
                    continue
                try:
                    file = await house.open(path.lstrip("/"))
                except SymError as error:
                    wrong[path] = error.errno
                else:
                    assert house.tokens(file) == TOKENS[path]
                    assert house.is_right(file)
            for path in PLAIN:
                if not house.volume.size_of(house.fs.find(ROOT, path.lstrip("/"))):
                    assert path in caplog.text
        return wrong

    refusal = ""
    wrong: dict[str, int | None] = {}
    try:
        wrong = trio.run(look)
    except SymError as error:
        refusal = str(error)
    assert not refusal or ("symphony fsck" in refusal and "--repair" in refusal and "\n" not in refusal)
    assert set(wrong.values()) <= {errno.EIO}
    assert wrong.keys() <= {*damage.paths}
    assert all(path in caplog.text for path in wrong)
    assert "Traceback" not in caplog.text
