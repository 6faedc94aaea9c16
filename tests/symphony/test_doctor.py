"""`symphony doctor`: every check names the fault and the cure, on real conditions."""

import json
import os
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

needs_fuse = pytest.mark.skipif(
    not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="NO MOUNT TESTED: /dev/fuse is missing or closed to this user"
)


@pytest.fixture
def named_socket(tmp_path, monkeypatch):
    path = tmp_path / "symphony.sock"
    monkeypatch.setenv("SYMPHONY_SOCKET", str(path))
    return path


def test_this_machine_can_run_symphony(named_socket):
    found = {check.name: check for check in checks()}
    assert [name for name, check in found.items() if check.ok is False] == []
    assert found["model"].ok
    assert found["python"].ok


@pytest.mark.parametrize(("setting", "ok"), [("0\n", None), ("1\n", True), (None, None)])
def test_links_that_the_kernel_follows_in_shared_directories_are_noted(tmp_path, setting, ok):
    path = tmp_path / "protected_symlinks"
    if setting is not None:
        path.write_text(setting)
    check = check_links(path)
    assert (check.name, check.ok) == ("protected_symlinks", ok)
    assert ("sysctl -w fs.protected_symlinks=1" in check.advice) == (ok is None)


def test_without_a_daemon_the_socket_is_named_and_nothing_has_failed(named_socket):
    check, info = check_daemon()
    assert check.ok is None
    assert str(named_socket) in check.detail
    assert "symphony serve" in check.advice
    assert info is None


def test_a_socket_that_a_killed_daemon_left_behind_is_a_failure(named_socket):
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(named_socket))
    check, info = check_daemon()
    assert check.ok is False
    assert str(named_socket) in check.detail
    assert "symphony serve" in check.advice
    assert info is None


def test_a_plain_directory_where_the_daemon_says_its_mount_is_fails(tmp_path):
    check = check_mount(tmp_path)
    assert check.ok is False
    assert str(tmp_path) in check.detail
    assert check.advice


def test_another_file_system_at_the_place_of_the_mount_fails():
    check = check_mount(Path("/proc"))
    assert check.ok is False
    assert "proc" in check.detail
    assert check.advice


@needs_fuse
def test_a_running_daemon_and_its_mount_are_found(daemon, monkeypatch):
    monkeypatch.setenv("SYMPHONY_SOCKET", str(daemon.socket))
    check, info = check_daemon()
    assert check.ok, check
    assert str(daemon.process.pid) in check.detail
    mount = check_mount(Path(info["mount"]))
    assert mount.ok, mount
    assert str(daemon.mount) in mount.detail


@pytest.mark.slow
@needs_fuse
def test_the_books_of_a_running_daemon_are_counted(daemon, monkeypatch):
    monkeypatch.setenv("SYMPHONY_SOCKET", str(daemon.socket))
    found = check_books(daemon.socket)
    total = daemon.stat()["num_pages"]
    assert found.ok, found
    assert found.detail.startswith(f"{total} free + 0 referenced = {total} pages; 0 references")
    assert checks()[-1] == found


@needs_fuse
@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED as another user: only root can become one")
def test_books_that_one_may_not_see_are_no_failure(daemon, monkeypatch):
    for directory in (daemon.socket.parent, *daemon.socket.parent.parents[:2]):
        directory.chmod(0o755)
    audit = doctor._AUDIT.replace("import json", "import os, json").replace("try:", "os.seteuid(65534)\ntry:")
    monkeypatch.setattr(doctor, "_AUDIT", audit)
    found = check_books(daemon.socket)
    assert found.ok is None
    assert "uid 65534" in found.detail


def test_books_that_do_not_balance_fail_with_what_the_daemon_says(monkeypatch, tmp_path):
    monkeypatch.setattr(
        doctor, "_AUDIT", "import sys; sys.stderr.write('the books do not balance: page 7'); sys.exit(5)"
    )
    found = check_books(tmp_path)
    assert found.ok is False
    assert found.detail == "the books do not balance: page 7"
    assert found.advice


@pytest.mark.slow
@needs_fuse
def test_a_daemon_that_hangs_does_not_hang_the_doctor(daemon, monkeypatch):
    monkeypatch.setenv("SYMPHONY_SOCKET", str(daemon.socket))
    monkeypatch.setattr(doctor, "PROBE_TIMEOUT_S", 1.0)
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        stopped, _ = check_daemon()
        blocked = check_mount(daemon.mount)
        uncounted = check_books(daemon.socket)
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    assert stopped.ok is False
    assert "no answer" in stopped.detail
    assert blocked.ok is False
    assert "no answer" in blocked.detail
    assert uncounted.ok is False
    assert "no answer" in uncounted.detail
    monkeypatch.undo()
    monkeypatch.setenv("SYMPHONY_SOCKET", str(daemon.socket))
    assert check_daemon()[0].ok


@pytest.mark.slow
@needs_fuse
def test_the_mount_of_a_killed_daemon_is_named_with_the_command_that_clears_it(tmp_path):
    killed = Daemon(tmp_path, "--model", "tiny", "--kv-memory", "8M")
    killed.process.kill()
    killed.process.wait()
    check = check_mount(killed.mount)
    assert check.ok is False
    assert check.advice.startswith(f"fusermount3 -uz {killed.mount}")
    done = run_bounded(check.advice.partition("  ")[0].split())
    assert done == (0, "", "")
    assert mounted_kind(killed.mount) is None
    killed.process.stdout.close()


@pytest.mark.slow
@needs_fuse
def test_mounts_with_blanks_and_umlauts_in_their_names_are_found(tmp_path):
    place = tmp_path / "für a"
    place.mkdir()
    daemon = Daemon(place, "--model", "tiny", "--kv-memory", "8M")
    assert mounted_kind(daemon.mount) == "fuse.kv"
    named = subprocess.run(["df", "--output=source", daemon.mount], capture_output=True, text=True, check=True)
    state = str(daemon.mount.with_name("state")).replace(" ", "_").replace("ü", "_")
    assert named.stdout.splitlines()[1] == f"symphony:{state}", "df tells two apart"
    assert daemon.stop() == 0
    assert mounted_kind(daemon.mount) is None


def test_a_missing_or_closed_fuse_device_says_how_to_get_it(tmp_path):
    missing = doctor.check_fuse_device(tmp_path / "fuse")
    assert missing.ok is False
    assert "modprobe fuse" in missing.advice
    closed = doctor.check_fuse_device(tmp_path)  # a directory opens for reading only, root or not
    assert closed.ok is False
    assert "chmod" in closed.advice


def test_a_missing_fusermount3_names_its_package(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    check = doctor.check_fusermount()
    assert check.ok is False
    assert "fuse3" in check.advice


def test_a_missing_compiler_is_only_worth_a_note(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.check_compiler().ok is None


def test_too_little_memory_is_a_failure_with_the_figures():
    check = doctor.check_memory(needed=1 << 60)
    assert check.ok is False
    assert "available" in check.detail
    assert check.advice


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
    conf.write_text("#user_allow_other\n")
    assert doctor.check_allow_other(conf, uid=1000).ok is None
    conf.write_text("mount_max = 10\nuser_allow_other\n")
    assert doctor.check_allow_other(conf, uid=1000).ok
    assert doctor.check_allow_other(tmp_path / "missing", uid=1000).ok is None
    assert doctor.check_allow_other(tmp_path / "missing", uid=0).ok


def test_the_exit_status_tells_whether_something_needed_failed(capsys):
    good, noted = Check("a", True, "fine"), Check("b", None, "so so", "do this")
    assert print_report([good, noted], as_json=False) == 0
    assert print_report([good, noted, Check("c", False, "bad", "do that")], as_json=False) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("FAIL  c  bad")
    assert lines[-1].endswith("-> do that")


def test_the_report_can_be_read_by_a_script(capsys):
    assert print_report([Check("b", None, "so so", "do this")], as_json=True) == 0
    assert json.loads(capsys.readouterr().out) == [{"name": "b", "ok": None, "detail": "so so", "advice": "do this"}]


def test_a_command_that_takes_too_long_is_given_up():
    assert run_bounded([sys.executable, "-c", "import signal; signal.pause()"], timeout_s=0.3) is None
