"""What a type checker tells the author of a program: everything, for the package says that it is typed."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import anyio
import idna
import pytest

import libsym as sym

PROGRAM = Path(__file__).with_name("typed_program.py")


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A Python that has libsym and what it needs as pip installs them, and nothing of this repository's settings."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (packages,) = (tmp_path / "venv" / "lib").glob("python3.*/site-packages")
    for package in (sym, anyio, idna):
        (packages / package.__name__).symlink_to(Path(str(package.__file__)).parent)
    return tmp_path / "venv" / "bin" / "python"


def mypy(python: Path, program: Path, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    options = ["--strict", "--config-file=", f"--cache-dir={tmp_path / 'cache'}", f"--python-executable={python}"]
    return subprocess.run(
        [sys.executable, "-m", "mypy", *options, program],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"]},  # no PYTHONPATH: as installed
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_a_program_that_uses_everything_passes_mypy_strict(installed: Path, tmp_path: Path) -> None:
    done = mypy(installed, PROGRAM, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_that_program_uses_every_name() -> None:
    tree = ast.parse(PROGRAM.read_text(encoding="utf-8"))
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert set(sym.__all__) - used == set()


@pytest.mark.slow
def test_a_program_that_is_wrong_is_told_so(installed: Path, tmp_path: Path) -> None:
    """Or the test above would pass for a package whose types nobody sees."""
    program = tmp_path / "wrong.py"
    program.write_text(
        "import libsym as sym\n"
        "sym.pred(sym.kv_create(), 'text', rows='some')\n"
        "sym.kv_chmod('a.kv')\n"
        "sym.aio.kv_chmod('a.kv', '0600')\n",
        encoding="utf-8",
    )
    told = mypy(installed, program, tmp_path).stdout
    assert 'No overload variant of "pred"' in told
    assert 'Missing positional argument "mode" in call to "kv_chmod"' in told
    assert 'Argument 2 has incompatible type "str"; expected "int"' in told
