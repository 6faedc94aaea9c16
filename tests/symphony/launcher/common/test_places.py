"""Places of a launcher's files, also where another user has been there first."""

import os

import pytest

from symphony.launcher.common import places
from symphony.launcher.common.places import Places, Refused, find_places, make


@pytest.fixture
def taken(monkeypatch, tmp_path):
    """The user's place in /tmp is another's; there is no runtime directory."""
    found = tmp_path / "taken"
    found.mkdir(mode=0o777)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.delenv("SYMPHONY_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: found.stat().st_uid or 54_321)
    monkeypatch.setattr(places, "shared_name", lambda _uid: found)
    return found


@pytest.mark.usefixtures("taken")
def test_without_another_place_a_launcher_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(places, "_USERS", tmp_path / "none")
    with pytest.raises(Refused, match="not a directory of yours alone"):
        make(find_places("/socket"))


@pytest.mark.skipif(os.geteuid() != 0, reason="NO OTHER USER TESTED: it needs root")
@pytest.mark.usefixtures("taken")
def test_a_launcher_whose_place_is_taken_has_one_among_all_users(monkeypatch, tmp_path, caplog):
    users, uid = tmp_path / "users", 54_321
    users.mkdir()
    (users / f"{uid}-0").mkdir()  # another's, who hopes that it is used
    (users / f"{uid}-1").symlink_to(tmp_path)
    monkeypatch.setattr(places, "_USERS", users)
    first = find_places("/socket").directory.parent
    assert first.parent == users
    assert not first.exists()
    assert first.name.startswith(f"{uid}-")
    assert str(first) in caplog.messages[0]
    first.mkdir(mode=0o700)
    os.chown(first, uid, uid)
    assert find_places("/socket").directory.parent == first


def test_a_directory_that_others_may_enter_is_no_launchers(tmp_path):
    (tmp_path / "symphony").mkdir(mode=0o755)
    with pytest.raises(Refused, match=r"is not a directory of yours alone \(0700\)"):
        make(Places(tmp_path / "symphony/a", "/socket"))
