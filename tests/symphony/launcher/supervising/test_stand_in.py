"""Stand-ins: processes of this machine for programs that programs have spawned on another machine."""

import json
from pathlib import Path
from typing import Any

import pytest

from symphony.launcher.common.places import Refused
from symphony.launcher.common.spec import LaunchLimits, Spec
from symphony.launcher.supervising.stand_in import MEMORY_BYTES, stand_in

PARENT = Spec(
    "/a.py", python=True, limits=LaunchLimits(tokens=100, memory=1000), allow_net=[("a.org", 443), ("2001:db8::1", 80)]
)


def words_of(directory: Path, parent: Spec = PARENT, **request: Any) -> list[str]:
    """Return the words of a stand-in after `symphony run`."""
    found = stand_in(parent, {"on": "west", "args": [], **request}, directory, "0000000a")
    assert (found.is_isolated, found.stands_for, found.limits.memory) == (False, "west:0000000a", MEMORY_BYTES)
    assert found.args[:4] == ["-P", "-m", "symphony.cli", "run"]
    return found.args[4:]


def test_a_program_elsewhere_has_its_parents_sandbox_grants_and_limits(tmp_path: Path):
    words = words_of(tmp_path, program="react", limits={"tokens": 500, "pages": 7}, args=["--x", "y z"], env={"K": "v"})
    assert words[-3:] == ["react", "--x", "y z"]
    assert set(words[:-3]) == {
        *("--on=west", "--isolation=standard", "--tokens=100", "--pages=7", "--memory=1000", "--id=0000000a"),
        *("--allow-net=a.org:443", "--allow-net=[2001:db8::1]:80", f"--env-json={tmp_path}/env.json"),
    }
    assert json.loads((tmp_path / "env.json").read_text()) == [["K", "v"]], "other users can read words"


def test_a_programs_text_comes_from_its_parent_and_not_from_a_path(tmp_path: Path):
    secret = tmp_path / "secret.py"
    secret.write_text("secret")
    (tmp_path / "sent").mkdir()
    file = Path(words_of(tmp_path / "sent", program=str(secret), source="print()")[-1])
    assert (file.parent, file.name, file.read_text()) == (tmp_path / "sent", "secret.py", "print()")
    with pytest.raises(Refused, match=r"no program .*secret\.py: it is no file"):
        words_of(tmp_path, program=str(secret))


@pytest.mark.parametrize("name", ["../../x.py", "-x.py", "a b.py", "\n.py", "x" * 300 + ".py"])
def test_the_name_of_a_text_leads_nowhere_else(tmp_path: Path, name: str):
    assert Path(words_of(tmp_path, program=name, source="1")[-1]).parent == tmp_path


def test_a_program_in_a_sandbox_chooses_no_directories_that_its_sandbox_elsewhere_shows(tmp_path: Path):
    with pytest.raises(Refused, match="can't choose PYTHONPATH"):
        words_of(tmp_path, program="react", env={"PYTHONPATH": "/home/user/.ssh"})
    words_of(tmp_path, Spec("/a.py", python=True, isolation="none"), program="react", env={"PYTHONPATH": "/x"})


def test_a_limit_that_run_does_not_know_is_refused(tmp_path: Path):
    with pytest.raises(Refused, match="no limit of page_seconds"):
        words_of(tmp_path, program="react", limits={"page_seconds": 5})
    with pytest.raises(Refused, match="no limit of page_seconds"):
        words_of(tmp_path, Spec("/a.py", python=True, limits=LaunchLimits(page_seconds=5)), program="react")


@pytest.mark.parametrize("host", ["localhost", "db.LOCALHOST.", "127.0.0.2", "::1", "fe80::1", "0.0.0.0"])
def test_a_grant_of_this_machines_own_addresses_is_refused(tmp_path: Path, host: str):
    parent = Spec("/a.py", python=True, allow_net=[(host, 80)])
    with pytest.raises(Refused, match="can't have the grant of"):
        words_of(tmp_path, parent, program="react")


def test_limits_are_written_as_run_reads_them(tmp_path: Path):
    words = words_of(tmp_path, Spec("/a.py", python=True), program="react", limits={"tokens": 50.0, "time": 0.00125})
    assert {"--tokens=50", "--time=0.00125"} <= {*words}
