"""Examples of the manual pages on commands and files, and the tutorial, symphony-tutorial(7): a test types them."""

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from symphony.manuals.manual import find_pages
from tests.symphony.typed import ROOT, Command, Shell, commands

NOT_TYPED = {
    "symphony-fleet-programs": "it takes Ray and a network: tests/symphony/test_fleet_run.py starts such programs",
    "symphony-service": "it installs a service: scripts/boot/boot.py does so",
    "symphony-top": "it takes a terminal: the tests of the view draw it",
    "symphony-tutorial": "a test of its own types it, in one shell",
}
"""Pages whose examples no shell of this test can run, each with the reason."""
STARTS = re.compile(r"^(\$|exec) symphony serve", re.MULTILINE)
"""Line of an example that starts a daemon."""
OTHERS = ("libsym", "lips")
"""Beginnings of names. test_libsym_manual.py runs examples in Python, and tests/lips those of the programs."""
PAGES = {
    f"{page.name}.{page.section}": page.text()
    for page in find_pages([ROOT / "man"])
    if not page.is_alias and page.name not in NOT_TYPED and not page.name.startswith(OTHERS)
}


@contextlib.contextmanager
def new_shell() -> Iterator[Shell]:
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("NO EXAMPLE WAS TYPED: /dev/fuse is missing or not open to this user")
    with tempfile.TemporaryDirectory(prefix="sm") as home, tempfile.TemporaryDirectory(prefix="sl") as runtime:
        shell = Shell(Path(home), Path(runtime))
        try:
            yield shell
        finally:
            shell.end()


@pytest.fixture(scope="module")
def shell() -> Iterator[Shell]:
    """A shell with a daemon, for all pages that start none."""
    with new_shell() as shell:
        shell.check(Command("symphony serve 2> daemon.log &", ["ready"], varies=True))
        yield shell


def type_all(page: str, shell: Shell) -> None:
    typed = list(commands(page))
    assert typed, "the page has no example"
    shell.check(Command('cd "$(mktemp -d -p ~)"'))
    for command in typed:
        shell.check(command)
    shell.check(Command("rm -rf /kv/*"))


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if not STARTS.search(page)])
def test_its_examples_can_be_typed_and_show_what_they_show(name, shell):
    type_all(PAGES[name], shell)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if STARTS.search(page)])
def test_examples_that_start_a_daemon_can_be_typed(name):
    if "exec etcd" in PAGES[name] and shutil.which("etcd") is None:
        pytest.skip("THE TUTORIAL OF FLEETS WAS NOT TYPED: there is no etcd (Debian's etcd-server)")
    with new_shell() as shell:
        type_all(PAGES[name], shell)


@pytest.mark.slow
@pytest.mark.timeout(300)  # eight seconds, where nothing else computes
def test_the_tutorial_can_be_typed_from_its_beginning_to_its_end():
    typed = list(commands((ROOT / "man" / "symphony-tutorial.7").read_text(encoding="utf-8")))
    assert len(typed) > 30
    with new_shell() as shell:
        for command in typed:
            shell.check(command)
        assert "Traceback" not in (shell.home / "tutorial" / "daemon.log").read_text()
        assert not os.path.ismount(shell.mount)
        assert not (shell.home / "s").exists()
