"""Attacks of other users and of keys, in their short form: each promise holds."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ATTACKS = [
    "caches",
    "deep_tree",
    "hard_links",
    "shared_names",
    "dates",
    "metrics",
    "gateway_costs",
    "gateway_files",
    "gateway_doors",
    "gateway_idle",
    "descriptors",
    "nonblocking",
    "socket_directory",
    "open_directories",
    "control_files",
    "unlinked",
    "attributes",
    "binds",
    "upgrade",
    "operators_files",
    "images",
    "watchdog",
    "sandboxes",
    "rings",
    "reloads",
    "ends",
    "odd_calls",
    "clocks",
    "hoard",
    "many_files",
]

pytestmark = [
    pytest.mark.skipif(
        not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="NO MOUNT TESTED: /dev/fuse is missing or closed"
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="NO ATTACK TRIED: needs root, to be several users"),
]


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_fails(name):
    command = [sys.executable, ROOT / f"scripts/attacks/{name}.py", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("held: ")


def test_how_long_attacks_held_the_main_thread_is_told():
    command = [sys.executable, ROOT / "scripts/soak/attacks.py", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^1 attacks; held over 1 ms \d+ of [1-9]\d* times", done.stdout, re.MULTILINE)


def test_every_attack_is_tried():
    assert {path.stem for path in (ROOT / "scripts/attacks").glob("*.py")} == {"attacked", *ATTACKS}


def test_the_page_on_security_names_every_attack():
    page = (ROOT / "man/symphony-security.7").read_text()
    assert [name for name in ATTACKS if not re.search(rf"\.IR? {name}\.py", page)] == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("Cases: \\fItwins\\fP.\n", ""), "twins: no case asks this cache"),
        (("\\fItwins\\fP", "\\fIsecrets\\fP"), "secrets: there is no such case"),
        ((", \\fIflights of keys\\fP", ""), "flights of keys: no cache of the table has this case"),
        ((".SH CACHES", ".SH NONE"), "grammars: no cache of the table has this case"),
    ],
)
def test_a_cache_of_the_manual_without_a_case_fails_the_checks(tmp_path, change, says):
    table = (ROOT / "man/symphony-security.7").read_text()
    assert change[0] in table
    page = tmp_path / "page.7"
    page.write_text(table.replace(*change))
    command = [sys.executable, ROOT / "scripts/attacks/caches.py", "--table"]
    done = subprocess.run([*command, page], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert says in done.stdout.splitlines()
    assert subprocess.run([*command, ROOT / "man/symphony-security.7"], check=False).returncode == 0
    assert "caches.py --table man/symphony-security.7" in (ROOT / "scripts/check").read_text()
