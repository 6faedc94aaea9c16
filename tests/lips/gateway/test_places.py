"""The gateway's directory: no other user has a say in its place, and all files in it are its user's."""

import os
import time
from types import SimpleNamespace

import anyio
import pytest

from lips.gateway import stored
from lips.gateway.places import Place, open_file, own_place

OWN = f"gateway-{os.geteuid()}"
OTHER = 4242
by_root = pytest.mark.skipif(os.geteuid() != 0, reason="NO OTHER USER'S FILE TESTED: needs root, to make one")


@pytest.fixture
def mount(tmp_path):
    """A root as the service's: everybody may make names in it."""
    root = tmp_path / "kv"
    root.mkdir()
    root.chmod(0o1777)
    return root


def test_it_is_made_for_its_user_alone_and_one_s_own_of_before_is_used_until_there_is_the_other(mount, caplog):
    (mount / "gateway").mkdir(0o755)
    assert own_place(str(mount), None).path == "gateway"
    assert not (mount / OWN).exists()
    (mount / "gateway").rename(mount / "away")
    assert own_place(str(mount), None) == Place(str(mount), OWN)
    assert (mount / OWN).stat().st_mode & 0o7777 == 0o700
    (mount / "away").rename(mount / "gateway")
    assert own_place(str(mount), None).path == OWN
    assert "--directory gateway" in caplog.text


def refused(says, call, *arguments):
    with pytest.raises(PermissionError, match=says) as found:
        call(*arguments)
    return str(found.value.filename)


@by_root
@pytest.mark.parametrize(
    ("name", "kind"), [(OWN, "directory"), (OWN, "closed"), ("gateway", "directory"), (OWN, "link"), (OWN, "file")]
)
def test_another_users_is_an_error_that_names_its_uid_and_another_may_be_chosen(mount, name, kind):
    foreign = mount / name
    if kind == "link":
        foreign.symlink_to(mount)
    elif kind == "file":
        foreign.touch()
    else:
        foreign.mkdir(0o700 if kind == "closed" else 0o777)
    os.lchown(foreign, OTHER, OTHER)
    assert refused(f"uid {OTHER}.*--directory PATH", own_place, str(mount), None) == str(foreign)
    assert own_place(str(mount), "mine").path == "mine"
    assert own_place(str(mount), f"{mount}/team/mine").path == "team/mine"


@by_root
def test_others_may_write_on_the_way_where_it_is_sticky_and_the_next_name_one_s_own_and_nowhere_else(mount):
    own, way = mount / OWN, mount / "open"
    own.mkdir()
    for mode in (0o777, 0o770, 0o1777):
        own.chmod(mode)
        refused("others may write", own_place, str(mount), None)
    way.mkdir()
    way.chmod(0o777)
    assert refused("others may write", own_place, str(mount), "open/mine") == str(way)
    way.chmod(0o1777)
    assert own_place(str(mount), "open/mine").path == "open/mine"
    os.chown(way / "mine", OTHER, OTHER)
    refused(f"uid {OTHER}", own_place, str(mount), "open/mine/below")
    own.chmod(0o700)
    mount.parent.chmod(0o777)
    assert refused("others may write", own_place, str(mount), None) == str(mount.parent)


@pytest.mark.parametrize("path", ["/tmp", "..", ".", "", "a/../../b"])
def test_a_directory_that_is_not_on_the_mount_is_refused(mount, path):
    with pytest.raises(OSError, match="on the mount"):
        own_place(str(mount), path)


def test_a_directory_that_became_a_link_is_not_followed(mount, tmp_path):
    place = own_place(str(mount), None)
    with place.opened("responses", make=True):
        pass
    (mount / OWN / "responses").rename(mount / "away")
    (mount / OWN / "responses").symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="no directory"), place.opened("responses", make=True):
        pass


@by_root
def test_a_file_is_opened_where_it_is_regular_and_one_s_own(mount):
    (mount / "secret").write_text("secret")
    (mount / "link").symlink_to(mount / "secret")
    os.mkfifo(mount / "fifo")
    (mount / "other").touch()
    os.chown(mount / "other", OTHER, OTHER)
    fd = os.open(mount, os.O_RDONLY)
    with os.fdopen(open_file("secret", fd)) as file:
        assert file.read() == "secret"
    for name, why in (("link", "link"), ("fifo", "regular"), ("other", f"uid {OTHER}")):
        refused(why, open_file, name, fd)
    with pytest.raises(FileNotFoundError):
        open_file("none", fd)
    os.close(fd)


@pytest.fixture
def tenant(mount):
    place = own_place(str(mount), None)
    for name in ("responses", "cached", "sessions"):
        with place.opened(name, make=True):
            pass
    return SimpleNamespace(place=place)


def test_what_is_old_goes_unless_it_has_its_other_half(tenant, mount):
    old = {
        "responses": ["resp_1.json", "resp_2.kv", "resp_3.json", "resp_3.kv", "resp_4.json.ab.new"],
        "cached": ["a.kv"],
        "sessions": ["ann.kv", ".ann.ab.new", "new.kv"],
    }
    for place, names in old.items():
        for name in names:
            path = mount / OWN / place / name
            path.touch()
            os.utime(path, (1, time.time() - stored.KEPT_S - 60))
            (path.parent / f"young-{name}").touch()
    anyio.run(stored.sweep, tenant)
    left = {place: sorted(each.name for each in (mount / OWN / place).iterdir()) for place in old}
    assert {place: [name for name in names if not name.startswith("young")] for place, names in left.items()} == {
        "responses": ["resp_3.json", "resp_3.kv"],
        "cached": [],
        "sessions": ["ann.kv", "new.kv"],
    }
    assert sum(map(len, left.values())) == 4 + sum(map(len, old.values()))


def test_a_link_goes_nowhere_for_the_sweep_and_for_what_is_stored(tenant, mount, tmp_path):
    response_id = "resp_" + "0" * 24
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "config.new").touch()
    os.utime(victim / "config.new", (1, 1))
    (victim / f"{response_id}.json").write_text('{"response": {}, "items": []}')
    (mount / OWN / "responses").rmdir()
    (mount / OWN / "responses").symlink_to(victim)
    for refused in (
        lambda: stored.sweep(tenant),
        lambda: stored.load(tenant, response_id),
        lambda: stored.save(tenant, stored.Stored({"id": response_id}, [])),
        lambda: stored.remove(tenant, response_id),
    ):
        with pytest.raises(PermissionError):
            anyio.run(refused)
    assert sorted(each.name for each in victim.iterdir()) == ["config.new", f"{response_id}.json"]
