"""Requests of the daemon to a launcher, without processes."""

import asyncio
import errno
from types import SimpleNamespace
from typing import Any

from symphony.launcher.common.spec import Spec
from symphony.launcher.supervising.daemon_requests import MAX_STAND_INS, DaemonRequests


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
