#!/usr/bin/env python3
"""Runs xfstests' generic tests on Symphony's mount, and compares their failures with the list in `expected.txt`.

`--xfstests` names the directory in which xfstests was built (git.kernel.org, fs/xfs/xfstests-dev). xfstests calls this
script as `mount` and `umount`: a mount of type fuse.kv starts a daemon with the tiny model. Run as root with the
repository's interpreter, on a machine that has the users which xfstests needs:

    .venv/bin/python scripts/conformance/xfstests.py --xfstests ~/xfstests    # the quick group
    .venv/bin/python scripts/conformance/xfstests.py --xfstests ~/xfstests generic/020 generic/683
    .venv/bin/python scripts/conformance/xfstests.py --xfstests ~/xfstests --out run   # and a table
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).resolve().parents[2]
EXPECTED = Path(__file__).with_name("expected.txt")
WORK = "SYMPHONY_XFSTESTS"
"""Environment variable with the directory of this run."""
PATIENCE_S = 60
CONFIG = """
export FSTYP=fuse FUSE_SUBTYP=.kv
export TEST_DEV=symphony:{work}/test TEST_DIR={work}/mnt-test
export SCRATCH_DEV=symphony:{work}/scratch SCRATCH_MNT={work}/mnt-scratch
export RESULT_BASE={work}/results
"""
"""Configuration of xfstests. The daemon names a mount after its state directory."""


def mount(words: list[str]) -> int:
    """Act as xfstests' mount(8): start a daemon for a file system of type fuse.kv, and pass all else to mount(8)."""
    real = os.environ[f"{WORK}_MOUNT"]
    options = {option for at, word in enumerate(words) if at and words[at - 1] == "-o" for option in word.split(",")}
    if "remount" in options:
        return subprocess.call([real, "-i", *words])
    if "fuse.kv" not in words:
        return subprocess.call([real, *words])
    source, mountpoint = words[-2:]
    status = serve(Path(source.partition(":")[2]), mountpoint)
    # The daemon's mounts are nosuid and nodev. Tests of setuid programs and of devices would only test these options.
    remount = ",".join(["remount", "suid", "dev", *options & {"ro", "nosuid", "nodev", "noexec"}])
    return status or subprocess.call([real, "-i", "-o", remount, mountpoint])


def serve(state: Path, mountpoint: str) -> int:
    """Start a daemon and wait for its mount."""
    command: list[str | Path] = [sys.executable, "-m", "symphony", "serve", "--model", "tiny", "--kv-memory", "64M"]
    command += ["--disk", "3G", "--mount", mountpoint, "--state", state, "--socket", f"{state}.socket"]
    with Path(f"{state}.log").open("ab") as log:
        daemon = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0)
    Path(f"{state}.pid").write_text(str(daemon.pid))
    deadline = time.monotonic() + PATIENCE_S
    while not os.path.ismount(mountpoint):
        if daemon.poll() is not None or time.monotonic() > deadline:
            print(f"mount: no daemon serves {state}: its log is {state}.log", file=sys.stderr)
            return 32
        time.sleep(0.02)
    return 0


def umount(words: list[str]) -> int:
    """Act as xfstests' umount(8): wait until the daemon of the mount has ended, so that another daemon can use its
    state.
    """
    status = subprocess.call([os.environ[f"{WORK}_UMOUNT"], *words])
    deadline = time.monotonic() + PATIENCE_S
    for pid_file in Path(os.environ[WORK]).glob("*.pid"):
        mountpoint = pid_file.with_name(f"mnt-{pid_file.stem}")
        while not os.path.ismount(mountpoint) and Path(f"/proc/{pid_file.read_text()}").exists():
            if time.monotonic() > deadline:
                print(f"umount: the daemon of {mountpoint} does not end", file=sys.stderr)
                return 32
            time.sleep(0.02)
    return status


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a test: held, failed, or not run for a reason."""

    name: str
    status: str
    seconds: int
    reason: str

    def __str__(self) -> str:
        return f"{self.name} {self.status:7} {self.seconds:4} s  {self.reason}".rstrip()


def run(xfstests: Path, tests: list[str], work: Path) -> list[Outcome]:
    """Run tests in the directory `work`. Return the outcome of each."""
    programs = work / "bin"
    programs.mkdir()
    found = {name: shutil.which(name) for name in ("mount", "umount")}
    scripts = {name: f'exec "{sys.executable}" "{Path(__file__).resolve()}" --as {name} -- "$@"' for name in found}
    scripts["df"] = f'{shutil.which("df")} "$@" | sed "s/ fuse.kv/ fuse/"'  # xfstests does not know subtypes of fuse
    for name, script in scripts.items():
        program = programs / name
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    for name in ("mnt-test", "mnt-scratch", "results"):
        (work / name).mkdir()
    config = work / "config"
    config.write_text(CONFIG.format(work=work))
    environ = os.environ | {WORK: str(work), "HOST_OPTIONS": str(config), "PATH": f"{programs}:{os.environ['PATH']}"}
    environ |= {f"{WORK}_{name.upper()}": path for name, path in found.items() if path}
    subprocess.run(["./check", "-R", "xunit", *(tests or ["-g", "quick"])], cwd=xfstests, env=environ, check=False)
    report = (work / "results" / "result.xml").read_text().replace(f"{work}/", "")
    return [outcome(case) for case in ET.fromstring(report).iter("testcase")]


def outcome(case: ET.Element) -> Outcome:
    """Read a test's outcome from xfstests' report."""
    failure, skipped = case.find("failure"), case.find("skipped")
    status = "failed" if failure is not None else "not run" if skipped is not None else "held"
    reason = "" if skipped is None else skipped.get("message", "")
    return Outcome(case.attrib["name"], status, int(case.attrib["time"]), reason)


def clean_up(work: Path) -> None:
    for name in ("mnt-test", "mnt-scratch"):
        if os.path.ismount(work / name):
            subprocess.run(["umount", "--lazy", work / name], check=True)


def keep(work: Path, out: Path) -> None:
    shutil.copytree(work / "results", out, dirs_exist_ok=True)
    for log in work.glob("*.log"):
        shutil.copy(log, out)


def expected() -> dict[str, str]:
    """Return the expected failures and the reason of each. A reason that begins with `sometimes` marks a test that may
    also hold.
    """
    lines = EXPECTED.read_text().splitlines()
    return {name: reason for name, _, reason in (line.partition(" ") for line in lines if not line.startswith("#"))}


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Run xfstests on the mount, and compare with what is expected to fail."
    )
    parser.add_argument("--xfstests", type=Path, required=True, help="the directory where xfstests was built")
    parser.add_argument("--out", type=Path, help="keep the tests' output, the daemons' logs and a table here")
    parser.add_argument("tests", nargs="*", help="like generic/020 (default: the quick group)")
    arguments = parser.parse_args()
    if not (arguments.xfstests / "check").is_file():
        parser.error(f"--xfstests {arguments.xfstests}: xfstests was not built there, for it has no `check`")
    with tempfile.TemporaryDirectory(prefix="symphony-xfstests-") as directory:
        work = Path(directory)
        work.chmod(0o755)  # some tests run as other users
        try:
            outcomes = run(arguments.xfstests, arguments.tests, work)
        finally:
            clean_up(work)
            if arguments.out:
                keep(work, arguments.out)
    if arguments.out:
        (arguments.out / "table.txt").write_text("".join(f"{outcome}\n" for outcome in outcomes))
    ran = {outcome.name for outcome in outcomes if outcome.status != "not run"}
    failed = {outcome.name for outcome in outcomes if outcome.status == "failed"}
    reasons = expected()
    always = {name for name, reason in reasons.items() if not reason.startswith("sometimes")}
    for name in sorted(failed):
        print(f"{name} failed: {reasons.get(name, 'NOT EXPECTED')}")
    for name in sorted(ran & always - failed):
        print(f"{name} holds, and the list expects it to fail")
    print(f"{len(ran)} ran, {len(failed)} failed, {len(failed - reasons.keys())} of them not expected")
    return 1 if not ran or failed - reasons.keys() or ran & always - failed else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as"]:
        sys.exit({"mount": mount, "umount": umount}[sys.argv[2]](sys.argv[4:]))
    sys.exit(main())
