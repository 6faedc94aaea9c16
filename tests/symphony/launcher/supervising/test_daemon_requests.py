"""Requests of the daemon to a launcher, without processes."""

import asyncio
import errno
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from symphony.launcher.common.spec import Spec
from symphony.launcher.common.statuses import LOST
from symphony.launcher.supervising.daemon_requests import MAX_STAND_INS, DaemonRequests
from symphony.launcher.supervising.program import End


def test_programs_get_no_more_stand_ins_than_a_user_may_have():
    answers = []
    specs = {"parent": Spec("/a.py", python=True)} | {
        str(number): Spec("/python", python=False, stands_for=f"west:{number}") for number in range(MAX_STAND_INS)
    }
    supervisor: Any = SimpleNamespace(
        living={name: SimpleNamespace(spec=spec) for name, spec in specs.items()},
        link=SimpleNamespace(answer=lambda _request, **words: answers.append(words)),
        spawn=asyncio.run,
    )
    DaemonRequests(supervisor).begin({"do": "spawn", "by": "parent", "program": "react", "on": "west"})
    assert [each["errno"] for each in answers] == [errno.EDQUOT]
    assert answers[0]["error"].startswith("32 programs run on other machines")


@pytest.mark.parametrize(
    ("status", "reason", "is_killed"),
    [
        (1, "exit", False),
        (LOST, "exit", True),
        (128 + signal.SIGKILL, "killed", True),
        (128 + signal.SIGTERM, "killed", False),  # such a stand-in had started nothing
    ],
)
def test_the_program_of_a_stand_in_that_ended_before_it_is_killed(tmp_path, status, reason, is_killed):
    started = []

    async def start(spec: Spec, **_more: object) -> Any:
        started.append(spec)
        return SimpleNamespace(spec=spec, record=record, over=over)

    async def tasks() -> None:
        over.set()
        parent = SimpleNamespace(spec=Spec("/a.py", python=True), record=SimpleNamespace(id="parent"))
        waiting = list[Any]()
        supervisor: Any = SimpleNamespace(
            living={"parent": parent},
            link=SimpleNamespace(answer=lambda _request, **_words: None),
            spawn=waiting.append,
            new_directory_of_sent=lambda: made(tmp_path / "sent"),
            start=start,
        )
        DaemonRequests(supervisor).begin({"do": "spawn", "by": "parent", "program": "react", "on": "west"})
        while waiting:
            await waiting.pop()

    over = asyncio.Event()
    record = SimpleNamespace(id="0000000b", name="react", pid=1, end=End(status, reason, 0.0))
    asyncio.run(tasks())
    assert [spec.args[3] for spec in started] == ["run", *(["kill"] if is_killed else [])]
    assert not (tmp_path / "sent").exists()


def made(directory: Path) -> Path:
    directory.mkdir()
    return directory
