"""`symphony doctor`: every check names the fault and the cure, on real conditions."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from symphony.checks import doctor
from symphony.checks.doctor import (
    Check,
    check_books,
    check_daemon,
    check_links,
    check_mount,
    checks,
    mounted_kind,
    print_report,
    run_bounded,
)
from tests.symphony.daemons import Daemon

TINY = ("--model", "tiny", "--kv-memory", "8M")


@pytest.fixture
def named_socket(tmp_path, monkeypatch):
    path = tmp_path / "symphony.sock"
    monkeypatch.setenv("SYMPHONY_SOCKET", str(path))
    return path


def is_failure(check, *words):
    """Whether a check has failed, with advice, and its details have the words."""
    return check.ok is False and bool(check.advice) and all(str(word) in check.detail for word in words)


@pytest.mark.slow
def test_this_machine_can_run_symphony(named_socket):
    found = {check.name: check for check in checks()}
    assert [name for name, check in found.items() if check.ok is False] == []
    assert found["model"].ok
    assert found["python"].ok


# ---- a daemon


def test_without_a_daemon_the_socket_is_named_and_one_that_a_killed_daemon_left_is_a_failure(named_socket):
    for expected in (None, False):
        check, info = check_daemon()
        assert (check.ok, info) == (expected, None)
        assert str(named_socket) in check.detail
        assert "symphony serve" in check.advice
        with socket.socket(socket.AF_UNIX) as left_behind:
            left_behind.bind(str(named_socket)) if expected is None else None


def test_what_is_not_the_mount_where_the_daemon_says_it_is_fails(tmp_path):
    assert is_failure(check_mount(tmp_path), tmp_path)
    assert is_failure(check_mount(Path("/proc")), "proc")


@pytest.mark.slow
def test_a_running_daemon_its_mount_and_its_books_are_found(shared):
    check, info = check_daemon()
    assert check.ok, check
    assert info is not None
    assert str(shared.process.pid) in check.detail
    mount = check_mount(Path(info["mount"]))
    assert mount.ok, mount
    assert str(shared.mount) in mount.detail
    found, total = check_books(shared.socket), shared.stat()["num_pages"]
    assert found.ok, found
    assert found.detail.startswith(f"{total} free + 0 referenced = {total} pages; 0 references")
    assert checks()[-1] == found


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED as another user: only root can become one")
def test_books_that_one_may_not_see_are_no_failure(shared, monkeypatch):
    for directory in (shared.socket.parent, *shared.socket.parent.parents[:2]):
        directory.chmod(0o755)
    audit = doctor._AUDIT.replace("import json", "import os, json").replace("try:", "os.seteuid(65534)\ntry:")
    monkeypatch.setattr(doctor, "_AUDIT", audit)
    found = check_books(shared.socket)
    assert found.ok is None
    assert "uid 65534" in found.detail


def test_books_that_do_not_balance_fail_with_what_the_daemon_says(monkeypatch, tmp_path):
    said = "the books do not balance: page 7"
    monkeypatch.setattr(doctor, "_AUDIT", f"import sys; sys.stderr.write({said!r}); sys.exit(5)")
    found = check_books(tmp_path)
    assert is_failure(found)
    assert found.detail == said


@pytest.mark.slow
def test_a_daemon_that_hangs_does_not_hang_the_doctor(shared, monkeypatch):
    monkeypatch.setattr(doctor, "PROBE_TIMEOUT_S", 1.0)
    shared.process.send_signal(signal.SIGSTOP)
    try:
        found = [check_daemon()[0], check_mount(shared.mount), check_books(shared.socket)]
    finally:
        shared.process.send_signal(signal.SIGCONT)
    assert all(is_failure(check, "no answer") for check in found), found
    monkeypatch.setattr(doctor, "PROBE_TIMEOUT_S", 30.0)
    assert check_daemon()[0].ok


@pytest.mark.slow
def test_mounts_of_odd_names_are_found_and_that_of_a_killed_daemon_is_named_with_the_command_that_clears_it(tmp_path):
    place = tmp_path / "für a"
    place.mkdir()
    daemon = Daemon(place, *TINY)
    assert mounted_kind(daemon.mount) == "fuse.kv"
    named = subprocess.run(["df", "--output=source", daemon.mount], capture_output=True, text=True, check=True)
    state = str(daemon.mount.with_name("state")).replace(" ", "_").replace("ü", "_")
    assert named.stdout.splitlines()[1] == f"symphony:{state}", "df tells two apart"
    daemon.stop(signal.SIGKILL)
    check = check_mount(daemon.mount)
    assert is_failure(check)
    command = shlex.split(check.advice.partition("  ")[0])
    assert command == ["fusermount3", "-uz", str(daemon.mount)]
    assert run_bounded(command) == (0, "", "")
    assert mounted_kind(daemon.mount) is None


# ---- the machine


def test_what_is_missing_on_the_machine_says_how_to_get_it(tmp_path, monkeypatch):
    assert "modprobe fuse" in doctor.check_fuse_device(tmp_path / "fuse").advice
    assert "chmod" in doctor.check_fuse_device(tmp_path).advice  # a directory opens for reading only, root or not
    assert is_failure(doctor.check_fuse_device(tmp_path / "fuse"))
    assert is_failure(doctor.check_fuse_device(tmp_path))
    assert is_failure(doctor.check_memory(needed=1 << 60), "available")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert is_failure(doctor.check_fusermount())
    assert "fuse3" in doctor.check_fusermount().advice
    assert doctor.check_compiler().ok is None, "only worth a note"


@pytest.mark.parametrize(("setting", "ok"), [("0\n", None), ("1\n", True), (None, None)])
def test_links_that_the_kernel_follows_in_shared_directories_are_noted(tmp_path, setting, ok):
    path = tmp_path / "protected_symlinks"
    if setting is not None:
        path.write_text(setting)
    check = check_links(path)
    assert (check.name, check.ok) == ("protected_symlinks", ok)
    assert ("sysctl -w fs.protected_symlinks=1" in check.advice) == (ok is None)


@pytest.mark.parametrize(
    ("flags", "ok", "word"),
    [
        ("avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_vnni avx512_bf16 amx_tile", True, "AMX"),
        ("avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_vnni avx512_bf16", True, "with bfloat16"),
        ("avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_vnni", True, "AVX-512"),
        ("avx2 fma f16c avx512f", True, "AVX2"),
        ("fpu fma f16c avx2", True, "AVX2"),
        ("fpu sse2", None, "slowly"),
    ],
)
def test_the_cpu_is_judged_by_its_instruction_sets(tmp_path, flags, ok, word):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    check = doctor.check_cpu(cpuinfo)
    assert check.ok is ok
    assert word in check.detail


def test_gpus_are_named_when_the_driver_shows_them(tmp_path):
    card = tmp_path / "0000:17:00.0"
    card.mkdir()
    (card / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   \t\t 77\n")
    assert "NVIDIA H200" in doctor.check_gpu(tmp_path).detail
    assert "no NVIDIA GPU" in doctor.check_gpu(tmp_path / "none").detail


def test_without_root_user_allow_other_has_to_be_a_line_of_its_own(tmp_path):
    conf = tmp_path / "fuse.conf"
    for text, uid, ok in (
        (None, 1000, None),
        (None, 0, True),
        ("#user_allow_other\n", 1000, None),
        ("mount_max = 10\nuser_allow_other\n", 1000, True),
    ):
        if text is not None:
            conf.write_text(text)
        assert doctor.check_allow_other(conf, uid=uid).ok is ok


# ---- the report


def test_the_report_and_the_exit_status_tell_whether_something_needed_failed(capsys):
    good, noted = Check("a", True, "fine"), Check("b", None, "so so", "do this")
    assert print_report([good, noted], as_json=False) == 0
    assert print_report([good, noted, Check("c", False, "bad", "do that")], as_json=False) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("FAIL  c  bad")
    assert lines[-1].endswith("-> do that")
    assert print_report([noted], as_json=True) == 0
    assert json.loads(capsys.readouterr().out) == [{"name": "b", "ok": None, "detail": "so so", "advice": "do this"}]


@pytest.mark.slow
def test_a_command_that_takes_too_long_is_given_up():
    assert run_bounded([sys.executable, "-c", "import signal; signal.pause()"], timeout_s=0.3) is None
