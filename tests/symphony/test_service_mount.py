"""A daemon without rights, whose mount a helper makes: its users, the right to ask for it, and a kill's remains."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from libsym.errors import NotConnected
from symphony.checks.doctor import check_helper, check_service, mounted_kind
from symphony.service.mount_helper import MAX_CONNECTIONS
from symphony.service.mounting import ANSWER_TIMEOUT_S, HelpersMount
from tests.scheduler.weapons import kernel_can_refuse
from tests.symphony.launchers import eventually
from tests.symphony.sandboxes import needs_sandbox
from tests.symphony.services import OTHER_UID, SERVICE_UID, Helper, as_user, start_service

HUNG_S = 3 * ANSWER_TIMEOUT_S
"""Time after which a daemon counts as hung."""

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="NO MOUNT HELPER TESTED: it needs root, and other users"),
    pytest.mark.skipif(not Path("/dev/fuse").exists(), reason="NO MOUNT TESTED: there is no /dev/fuse"),
]


@pytest.fixture(scope="module")
def service_directory(tmp_path_factory):
    return tmp_path_factory.mktemp("service")


@pytest.fixture(scope="module")
def helper(service_directory):
    helper = Helper(service_directory, service_directory / "kv", service_directory / "other")
    yield helper
    helper.close()


@pytest.fixture(scope="module")
def service(service_directory, helper):
    daemon = start_service(service_directory, helper)
    try:
        yield daemon
        assert daemon.stop() == 0, daemon.log.read_text()
        assert mounted_kind(daemon.mount) is None
        assert "Traceback" not in daemon.log.read_text()
        assert "Traceback" not in helper.log.read_text()
    finally:
        daemon.clean_up()


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


@contextmanager
def asking(helper: Helper, message: object, uid: int = SERVICE_UID) -> Iterator[dict]:
    """Ask the helper as a process of `uid`; its answer, while the connection lasts that it came by."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(60)
        os.seteuid(uid)  # SO_PEERCRED is what it was at connect()
        try:
            connection.connect(str(helper.path))
        finally:
            os.seteuid(0)
        connection.send(message if isinstance(message, bytes) else json.dumps(message).encode())
        data, descriptors, _, _ = socket.recv_fds(connection, 8192, 4)
        for each in descriptors:
            os.close(each)
        yield json.loads(data)


def ask(helper: Helper, message: object, uid: int = SERVICE_UID) -> dict:
    with asking(helper, message, uid) as answer:
        return answer


@pytest.mark.slow
def test_the_daemon_has_no_rights_and_others_see_its_mount(service):
    status = status_of(service.process.pid)
    assert status["Uid"].split() == [str(SERVICE_UID)] * 4
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
    assert status["NoNewPrivs"] == "1"
    assert Path(f"/proc/{service.process.pid}/ns/mnt").readlink() != Path("/proc/self/ns/mnt").readlink()
    assert mounted_kind(service.mount) == "fuse.kv"
    named = subprocess.run(["findmnt", "-no", "SOURCE", service.mount], capture_output=True, text=True, check=True)
    assert named.stdout.strip() == f"symphony:{service.mount.with_name('state')}"
    assert service.mount.stat().st_mode & 0o7777 == 0o1777
    said = service.run(as_user(OTHER_UID, f"print(os.listdir('{service.mount}/.symphony'))"))
    assert "metrics" in said


def test_a_user_has_files_that_other_users_can_not_read(service):
    path = service.mount / "mine.kv"
    service.run(as_user(OTHER_UID, "with sym.kv_create('mine.kv') as kv: sym.pred(kv, [1, 2, 3]); sym.kv_sync(kv)"))
    assert (path.stat().st_uid, path.stat().st_mode & 0o777) == (OTHER_UID, 0o600)
    look = f"""
        try: open("{path}").read()
        except PermissionError: print("the mount says no")
        try: sym.kv_open("mine.kv")
        except sym.NoAccess: print("the daemon says no")
        os.mkdir("{service.mount}/of-another")
    """
    assert service.run(as_user(OTHER_UID + 1, look)) == "the mount says no\nthe daemon says no\n"
    os.chown(path, OTHER_UID + 1, OTHER_UID + 1)  # as root may on any file system
    assert service.run(as_user(OTHER_UID + 1, "print(len(sym.kv_open('mine.kv')))")) == "3\n"


@pytest.mark.slow
@needs_sandbox
def test_a_program_in_a_sandbox_has_the_mount_of_the_helper(service, tmp_path):
    program = tmp_path / "p.py"
    program.write_text("import libsym as sym\nkv = sym.kv_create('boxed.kv')\nsym.pred(kv, [1])\nprint(len(kv))\n")
    done = service.shell(f"{sys.executable} -m symphony run {program}", check=False)
    assert (done.stdout, done.returncode) == ("1\n", 0), done.stderr
    assert (service.mount / "boxed.kv").exists()


REFUSED = [
    ({"do": "mount", "at": "MOUNT"}, errno.EBUSY, "stop it first"),
    ({"do": "keep", "at": "MOUNT"}, errno.EBUSY, "stop it first"),
    ({"do": "mount", "at": "/etc"}, errno.EPERM, "its unit names"),
    ({"do": "mount", "at": "MOUNT/../../../etc"}, errno.EPERM, "its unit names"),
    ({"do": "keep", "at": "OTHER"}, errno.ENOENT, "no mount of uid"),
    ({"do": "unmount", "at": "MOUNT"}, errno.EINVAL, "a request is one of"),
    ({"do": "mount", "at": 7}, errno.EINVAL, "a request is one of"),
    ({"do": "mount", "at": "MOUNT", "source": "/dev/sda1"}, errno.EINVAL, "a mount's source is"),
    ({"do": "mount", "at": "MOUNT", "source": "symphony:a b"}, errno.EINVAL, "a mount's source is"),
    (["mount"], errno.EINVAL, "no request"),
    (b"\xff" * 100, errno.EINVAL, "no request"),
    ({"do": "mount", "at": "/two\n<0>lines"}, errno.EPERM, "'/two\\n<0>lines' is no mount point"),
]


def test_the_helper_refuses_what_its_unit_does_not_name(service, helper):
    for message, code, text in REFUSED:
        if isinstance(message, dict) and isinstance(message["at"], str):
            at = message["at"].replace("MOUNT", str(service.mount))
            message = {**message, "at": at.replace("OTHER", str(service.mount.with_name("other")))}  # noqa: PLW2901
        answer = ask(helper, message)
        assert (answer["errno"], text in answer["error"]) == (code, True), message
    assert "\n<0>" not in helper.log.read_text()
    assert service.stat()["pid"] == service.process.pid


@pytest.mark.skipif(not kernel_can_refuse(), reason="NO REFUSAL TESTED: it needs Linux 6.16")
def test_the_helper_has_the_kernel_refuse_descriptors(helper, service):
    """The unit's socket lets them pass: the helper itself sets the option."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(str(helper.path))
        with pytest.raises(PermissionError):
            socket.send_fds(client, [b"x"], [0])


def test_the_helper_serves_no_other_user_not_even_root_and_mounts_over_no_link_and_no_file(service, helper):
    other = service.mount.with_name("other")
    for uid in (OTHER_UID, 0):
        answer = ask(helper, {"do": "mount", "at": str(other)}, uid)
        assert (answer["errno"], f"not uid {uid}" in answer["error"]) == (errno.EPERM, True)
    other.symlink_to("/etc")
    assert ask(helper, {"do": "mount", "at": str(other)})["errno"] in (errno.ELOOP, errno.ENOTDIR)
    other.unlink()
    other.mkdir()
    (other / "precious").touch()
    assert ask(helper, {"do": "mount", "at": str(other)})["errno"] == errno.ENOTEMPTY
    (other / "precious").unlink()


def test_a_link_on_the_way_to_a_mount_point_is_refused(tmp_path, open_to_all):
    """The kernel's list of mounts has the other name: the helper would not find what it has mounted."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    helper = Helper(tmp_path, tmp_path / "link/kv")
    try:
        for _ in range(2):  # it is still there
            answer = ask(helper, {"do": "mount", "at": str(tmp_path / "link/kv")})
            assert answer["errno"] == errno.ELOOP
            assert f"is {tmp_path}/real/kv, by a link on the way" in answer["error"]
        assert mounted_kind(tmp_path / "real/kv") is None
    finally:
        helper.close()


def test_a_daemon_that_connects_without_end_ends_no_helper(service, helper):
    connections = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(MAX_CONNECTIONS + 10)]
    for each in connections:
        each.connect(str(helper.path))
    connections[-1].settimeout(60)
    assert connections[-1].recv(1) == b""
    for each in connections:
        each.close()
    assert service.stat()["mount_helper"]["kept"]


def test_the_end_of_a_connection_is_the_end_of_its_mount_and_of_no_other(service, helper):
    other = service.mount.with_name("other")
    with asking(helper, {"do": "mount", "at": str(other)}) as answer:
        assert answer == {"ok": True}
        assert mounted_kind(other) == "fuse.kv"
    eventually(lambda: mounted_kind(other) is None)
    assert mounted_kind(service.mount) == "fuse.kv"


def test_doctor_looks_whether_the_helper_is_there(service):
    there, gone, none = (
        check_helper(each) for each in (service.stat(), {"mount_helper": {"kept": False}}, {"mount_helper": None})
    )
    assert (there and there.ok, none) == (True, None)
    assert (gone and (gone.ok, gone.advice)) == (False, "systemctl start symphony-mount.socket")


SAID = {
    "LoadState=not-found\nActiveState=inactive": (None, "no symphony.service is installed"),
    "LoadState=loaded\nActiveState=active\nResult=success\nNRestarts=0": (True, "active"),
    "LoadState=loaded\nActiveState=failed\nResult=watchdog\nNRestarts=3": (False, "watchdog, started again 3 times"),
    "LoadState=loaded\nActiveState=inactive\nResult=success\nNRestarts=0": (None, "inactive"),
}


def test_doctor_says_what_systemd_has_of_the_service(tmp_path, monkeypatch):
    systemctl = tmp_path / "systemctl"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for said, (ok, detail) in SAID.items():
        systemctl.write_text(f"#!/bin/sh\nprintf '{said}'\n")
        systemctl.chmod(0o755)
        found = check_service(tmp_path)
        assert (found.ok, detail in found.detail) == (ok, True), said
    assert check_service(tmp_path / "none").ok is None


@pytest.mark.slow
def test_a_helper_that_is_killed_takes_no_mount_with_it_and_the_next_one_keeps_it(service, helper):
    helper.kill()
    assert service.run("print(len(sym.kv_create()))") == "0\n"
    eventually(lambda: not service.stat()["mount_helper"]["kept"])
    helper.start_again()
    eventually(lambda: service.stat()["mount_helper"]["kept"])
    assert mounted_kind(service.mount) == "fuse.kv"
    assert (service.mount / ".symphony/metrics").exists()


@pytest.fixture
def own_helper(tmp_path):
    tmp_path.chmod(0o755)
    helper = Helper(tmp_path, tmp_path / "kv")
    yield helper
    helper.close()


@pytest.fixture
def start(tmp_path, own_helper):
    """Starts services in the test's own directory, over a helper of its own."""
    daemons = []

    def start():
        daemons.append(start_service(tmp_path, own_helper))
        return daemons[-1]

    yield start
    for daemon in daemons:
        daemon.clean_up()


def kill(daemon):
    daemon.process.kill()
    daemon.process.wait()


@pytest.mark.slow
def test_kill_9_leaves_no_mount_or_one_that_the_next_daemon_clears_and_every_synced_file(start, own_helper):
    daemon = start()
    daemon.run("kv = sym.kv_create('kept.kv'); sym.pred(kv, [5, 6, 7]); sym.kv_sync(kv)")
    kill(daemon)
    eventually(lambda: mounted_kind(daemon.mount) is None)
    assert not any(daemon.mount.iterdir())
    again = start()
    assert again.run("print(len(sym.kv_open('kept.kv')))") == "3\n"
    own_helper.kill()
    kill(again)  # together: nobody was there to unmount
    assert mounted_kind(daemon.mount) == "fuse.kv"
    with pytest.raises(OSError, match="not connected"):
        daemon.mount.stat()
    own_helper.start_again()
    third = start()
    assert (third.mount / ".symphony/metrics").exists()
    before = third.log.read_text()
    own_helper.kill()  # and its socket is there: who connects waits
    eventually(lambda: "the mount helper is gone" in third.log.read_text().removeprefix(before))
    third.process.send_signal(signal.SIGTERM)
    assert third.process.wait(HUNG_S) == 0
    assert "trying again" not in third.log.read_text().removeprefix(before), "the request was left, not waited for"
    own_helper.start_again()


def test_without_a_helper_the_daemon_says_what_to_start(tmp_path):
    with pytest.raises(NotConnected, match=r"start symphony-mount\.socket"):
        HelpersMount(tmp_path / "nobody").mount(tmp_path / "kv", "symphony:state")
