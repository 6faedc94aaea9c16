"""Workers: each test runs once, in one worker a file; failures, crashes, interruptions and `-x` are the suite's."""

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.slow

FILES = {
    "test_one.py": """
        import os, pathlib, pytest
        @pytest.fixture(scope="session", autouse=True)
        def made():
            yield
            pathlib.Path(f"removed-by-{os.getpid()}").touch()
        @pytest.fixture(scope="module")
        def file():
            return [os.getpid()]
        @pytest.mark.parametrize("number", range(3))
        def test_fine(file, number, tmp_path):
            assert file == [os.getpid()] != [os.getppid()]
            assert tmp_path.parent.name == "worker" + os.environ["SYMPHONY_TEST_WORKER"]
        def test_wrong(capfd):
            print("shown to capfd")
            assert capfd.readouterr().out == "shown to capfd\\n"
            print("shown with the failure")
            assert 1 == 2
    """,
    "test_two.py": """
        import pytest, time, pathlib
        def test_skipped():
            pytest.skip("not here")
        def test_beside():
            pathlib.Path("two").touch()
            while not pathlib.Path("three").exists():
                time.sleep(0.01)
    """,
    "test_three.py": """
        import time, pathlib
        def test_beside():
            pathlib.Path("three").touch()
            while not pathlib.Path("two").exists():
                time.sleep(0.01)
    """,
}
CRASH = "import os, signal\ndef test_dies(): os.kill(os.getpid(), signal.SIGKILL)\ndef test_never(): pass\n"


@pytest.fixture
def suite(tmp_path):
    (tmp_path / "conftest.py").write_text("from tests.workers import pytest_addoption, pytest_configure")

    def start(files, *options, num=2):
        for name, source in files.items():
            (tmp_path / name).write_text(textwrap.dedent(source))
        words = ["-m", "pytest", "--rootdir", tmp_path, "--basetemp", tmp_path / "base", "-p", "no:cacheprovider"]
        return subprocess.Popen(
            [sys.executable, *words, "--processes", str(num), *options, tmp_path],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    return start


def said(process) -> str:
    try:
        with process:
            return process.communicate(timeout=60)[0]
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise


def test_workers_run_each_test_once_and_end_their_fixtures(suite, tmp_path):
    process = suite(FILES, "-ra")
    out = said(process)
    assert process.returncode == 1, out
    assert re.search(r"\n= 1 failed, 5 passed, 1 skipped in ", re.sub("=+", "=", out)), out
    assert "FAILED test_one.py::test_wrong - assert 1 == 2" in out
    assert "shown with the failure" in out
    assert "not here" in out
    assert re.search(r"[.Fs]{7} +\[100%\]", out), out
    assert len([*tmp_path.glob("removed-by-*")]) == 1  # the other one has run no test of that session's fixture


def test_a_test_that_ends_its_worker_has_failed_and_the_other_files_run(suite):
    out = said(process := suite({"test_a.py": CRASH} | FILES, num=3))
    assert process.returncode == 1, out
    assert "FAILED test_a.py::test_dies - a worker ended with " in out
    assert "\na worker ended with status -9: the rest of this file has not run\n" in out
    assert "2 failed, 5 passed" in out


def test_files_that_no_worker_is_left_for_are_told(suite):
    out = said(process := suite({f"test_{name}.py": CRASH for name in "abc"}))
    assert process.returncode == 1, out
    assert "all workers have ended, and files of tests are left" in out
    assert "2 failed" in out


def test_the_first_failure_ends_the_workers_if_it_is_asked_to(suite):
    sleeps = """
        import time, pathlib
        def test_sleeps():
            pathlib.Path("sleeps").touch()
            time.sleep(600)
    """
    fails = """
        import time, pathlib
        def test_fails():
            while not pathlib.Path("sleeps").exists():
                time.sleep(0.01)
            assert 0
    """
    out = said(process := suite({"test_a.py": sleeps, "test_b.py": fails}, "-x"))
    assert process.returncode == 1, out
    assert "stopping after 1 failures" in out


def test_an_interruption_ends_the_workers_with_their_fixtures(suite, tmp_path):
    sleeps = """
        import time, pathlib, pytest
        @pytest.fixture
        def made():
            yield pathlib.Path("sleeps").touch()
            pathlib.Path("removed").touch()
        def test_sleeps(made):
            time.sleep(600)
    """
    process = suite({"test_a.py": sleeps})
    while not (tmp_path / "sleeps").exists():
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    out = said(process)
    assert process.returncode == 2, out
    assert (tmp_path / "removed").exists()
