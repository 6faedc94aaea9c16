"""The real command tells a person at a terminal what a sandbox hides, which names are near, and what to do next."""

import re

import pytest

from symphony.launcher.sandbox.probe import probe

isolated = pytest.mark.skipif(probe() is not None, reason=f"NO SANDBOX TESTED: {probe()}")


@pytest.fixture
def home(launchers):
    """The user's home directory, with a program and what it needs beside it."""
    home = launchers.runtime / "home"
    home.mkdir()
    launchers.environment["HOME"] = str(home)
    launchers.directory = home
    (home / "neighbour.py").write_text("NAME = 'neighbour'")
    (home / "data.txt").write_text("data")
    return home


@isolated
def test_run_names_hidden_directories_and_files_with_the_options_that_show_them(launchers, home):
    source = "import neighbour\nprint(neighbour.NAME, open(sys.argv[1]).read())\nopen(sys.argv[2], 'w').write('new')"
    program = launchers.script(source)
    done = launchers.symphony("run", program, "data.txt", "--out=new.txt", "a question?", check=False)
    said, *rest = done.stderr.splitlines()
    assert rest[-1] == "ModuleNotFoundError: No module named 'neighbour'"
    assert said == (
        f"symphony: the sandbox hides {home}, data.txt, --out=new.txt from the program; "
        f"to show it: symphony run --bind {home} ..."
    )
    [option] = re.findall(r"--bind \S+", said)
    shown = launchers.symphony("run", *option.split(), program, "data.txt", "new.txt")
    assert (shown.stdout, shown.stderr, (home / "new.txt").read_text()) == ("neighbour data\n", "", "new")
    to_read = launchers.symphony("run", program, check=False).stderr.splitlines()[0]
    assert to_read.endswith(f"hides {home} from the program; to show it: symphony run --bind {home}:ro ...")


@isolated
def test_of_a_program_that_ships_run_names_hidden_arguments_alone(launchers, home):
    (home / "ask").mkdir()
    assert launchers.symphony("run", "ask", "--help").stderr == "", "the program goes before the directory of its name"
    done = launchers.symphony("run", "ask", str(home / "data.txt"), "--help")
    assert done.stderr == (
        f"symphony: the sandbox hides {home}/data.txt from the program; "
        f"to show it: symphony run --bind {home}/data.txt:ro ...\n"
    )
