"""The library as a whole: what importing it costs, its errors, its paths, its C."""

import os
import pickle
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import libsym as sym
from libsym.channel import socket_path as paths
from libsym.channel.socket_path import check_private, default_socket, find_socket
from libsym.errors import error_for
from tests.libsym.echo_client import ENVIRONMENT

HOUSE = Path(sym.__file__).parent


def test_importing_it_brings_nothing_heavy_and_its_coroutines_bring_anyio() -> None:
    heavy = ["numpy", "torch", "trio", "anyio", "asyncio", "jinja2", "tokenizers", "argparse"]
    script = f"""if True:
        import libsym, sys
        print([heavy for heavy in {heavy} if heavy in sys.modules])
        libsym.aio.pred
        print("anyio" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, check=True)
    assert done.stdout == b"[]\nTrue\n"


def test_what_the_package_promises_is_there() -> None:
    assert sorted(sym.__all__) == sorted(set(sym.__all__))
    for name in sym.__all__:
        assert re.match(r"\S", getattr(sym, name).__doc__ or ""), f"{name} does not say what it does"
    assert (HOUSE / "py.typed").exists()


@pytest.mark.parametrize("cls", sorted(sym.SymError.__subclasses__(), key=str))
def test_errors_survive_pickling_and_print_as_one_line(cls: type[sym.SymError]) -> None:
    error = cls("what.kv is not there: create it first")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.errno) == (cls, str(error), cls.code)
    assert isinstance(error, OSError)
    assert str(error) == "what.kv is not there: create it first"
    assert type(error_for(cls.code, "x")).code == cls.code


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A directory for a user of whom the environment says nothing."""
    for name in ("SYMPHONY_SOCKET", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54_321)
    return tmp_path


@pytest.mark.usefixtures("user")
def test_the_default_socket_is_where_it_is_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_socket() == Path("/tmp/symphony-54321/symphony.sock")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/54321")
    assert default_socket() == Path("/run/user/54321/symphony.sock")
    monkeypatch.setattr(os, "getuid", lambda: 0)
    assert default_socket() == Path("/run/symphony/symphony.sock")
    monkeypatch.setenv("SYMPHONY_SOCKET", "/named/by.sock")
    assert default_socket() == Path("/named/by.sock")


def test_a_user_without_a_daemon_finds_the_systems(monkeypatch: pytest.MonkeyPatch, user: Path) -> None:
    own, system = user / "symphony.sock", user / "system.sock"
    monkeypatch.setattr(paths, "_SYSTEM_SOCKET", system)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(user))
    assert find_socket() == own
    system.touch()
    assert find_socket() == system
    own.touch()
    assert find_socket() == own


def test_a_user_whose_place_another_has_taken_finds_the_systems_and_is_told(monkeypatch, user, caplog):
    taken, system = user / "taken", user / "system.sock"
    taken.mkdir(mode=0o777)
    monkeypatch.setattr(paths, "shared_name", lambda _uid: taken)
    monkeypatch.setattr(paths, "_SYSTEM_SOCKET", system)
    with pytest.raises(sym.NoAccess, match=f"it is uid {taken.stat().st_uid}'s"):
        find_socket()
    assert not caplog.messages
    system.touch()
    assert find_socket() == system
    assert caplog.messages[0].endswith(f"set SYMPHONY_SOCKET. Going on with the daemon at {system}")


def test_a_directory_that_others_can_enter_is_no_place_for_a_socket(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    check_private(mine, os.getuid())  # not there yet
    mine.mkdir(mode=0o700)
    check_private(mine, os.getuid())
    (tmp_path / "link").symlink_to(mine)
    for path, uid in [(mine, os.getuid() + 1), (tmp_path / "link", os.getuid())]:
        with pytest.raises(sym.NoAccess):
            check_private(path, uid)
    mine.chmod(stat.S_IRWXU | stat.S_IRGRP)
    with pytest.raises(sym.NoAccess, match="SYMPHONY_SOCKET"):
        check_private(mine, os.getuid())
