"""Type checking of programs: the package declares that it is typed, so a checker sees every name."""

import os
import subprocess
import sys
from pathlib import Path

import anyio
import idna
import pytest

import libsym as sym

PROGRAM = Path(__file__).with_name("typed_program.py")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has libsym and what it needs as pip installs them, and nothing of this repository's settings."""
    venv = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (packages,) = (venv / "lib").glob("python3.*/site-packages")
    for package in (sym, anyio, idna):
        (packages / package.__name__).symlink_to(Path(str(package.__file__)).parent)
    return venv / "bin" / "python"


def mypy(python: Path, program: Path) -> subprocess.CompletedProcess[str]:
    place = python.parents[2]
    options = ["--strict", "--config-file=", f"--cache-dir={place / 'cache'}", f"--python-executable={python}"]
    return subprocess.run(
        [sys.executable, "-m", "mypy", *options, program],
        cwd=place,
        env={"PATH": os.environ["PATH"]},  # no PYTHONPATH: as installed
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_a_program_passes_mypy_strict_where_overloads_and_twins_decide_its_types(installed: Path) -> None:
    done = mypy(installed, PROGRAM)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_program_that_is_wrong_is_told_so(installed: Path, tmp_path: Path) -> None:
    """The test above alone would pass for a package whose types nobody sees."""
    program = tmp_path / "wrong.py"
    program.write_text(
        "import libsym as sym\n"
        "sym.pred(sym.kv_create(), 'text', rows='some')\n"
        "sym.kv_chmod('a.kv')\n"
        "sym.aio.kv_chmod('a.kv', '0600')\n",
        encoding="utf-8",
    )
    told = mypy(installed, program).stdout
    assert 'No overload variant of "pred"' in told
    assert 'Missing positional argument "mode" in call to "kv_chmod"' in told
    assert 'Argument 2 has incompatible type "str"; expected "int"' in told
