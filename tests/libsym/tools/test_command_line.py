"""The arguments of a program: what is of no use ends it in one line with status 2, and its docstring is its help."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import libsym as sym

Added = Callable[[sym.Arguments], None]


def one(added: Added) -> sym.Arguments:
    arguments = sym.Arguments("Does it.\n\n    symphony run it 7\n")
    added(arguments)
    return arguments


def whole(arguments: sym.Arguments) -> None:
    arguments.whole("it")


def share(arguments: sym.Arguments) -> None:
    arguments.number("it", least=0, most=1)


REFUSED: list[tuple[Added, str, str]] = [
    (whole, "0", "'0' is not 1 or more"),
    (whole, "-1", "'-1' is not 1 or more"),
    (whole, "1.5", "'1.5' is no whole number"),
    (whole, "nan", "'nan' is no whole number"),
    (whole, "9" * 5000, "is no whole number"),
    (whole, "9999999999", "is not from 1 to 2147483647"),
    (lambda arguments: arguments.whole("it", least=0, most=9), "10", "'10' is not from 0 to 9"),
    (share, "nan", "'nan' is no finite number"),
    (share, "inf", "'inf' is no finite number"),
    (share, "x", "'x' is no finite number"),
    (share, "1.1", "'1.1' is not from 0 to 1"),
    (lambda arguments: arguments.number("it", least=0), "-3", "'-3' is not 0 or more"),
    (lambda arguments: arguments.text("it"), "", "the text is empty"),
    (lambda arguments: arguments.text("it"), "\udcff", "is no UTF-8 text"),
    (lambda arguments: arguments.file("it"), "no\nfile", "No such file or directory"),
    (lambda arguments: arguments.file("it"), ".", "'.' is no file"),
    (lambda arguments: arguments.document("it"), "no\nfile", "No such file or directory"),
    (lambda arguments: arguments.document("it"), "/dev/null", "'/dev/null' has no text"),
    (lambda arguments: arguments.directory("it"), __file__, "is no directory"),
    (lambda arguments: arguments.directory("it"), "", "'' is no directory"),
    (lambda arguments: arguments.kv("it"), "", "is no path"),
]


@pytest.mark.parametrize(("added", "given", "why"), REFUSED)
def test_what_is_of_no_use_ends_the_program_in_one_line(added, given, why, monkeypatch, capsys):
    shipped = Path(sym.__file__).resolve().parents[1] / "lips" / "beam.py"
    monkeypatch.setattr(sys, "argv", [str(shipped), "--", given])
    with pytest.raises(SystemExit) as ended:
        one(added).parse_args()
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("symphony run beam: argument it: ")
    assert why in err
    assert err.count("\n") == 1


def test_what_can_be_used_is_taken_as_what_it_is() -> None:
    arguments = sym.Arguments("Does it.")
    arguments.whole("--most", "of them", 3)
    arguments.number("--scale")
    arguments.file("--file")
    arguments.document("--text")
    arguments.kv("kv", "where", "chat.kv")
    args = arguments.parse_args(["--scale", "-1.5e3", "--file", __file__, "a talk with spaces.kv", "--text", __file__])
    assert (args.most, args.scale, args.file, args.kv) == (3, -1500.0, Path(__file__), "a talk with spaces.kv")
    assert args.text == ("test_command_line.py", Path(__file__).read_text())
    assert arguments.parse_args([]).kv == "chat.kv"


def test_an_option_that_is_not_known_is_answered_by_the_one_that_is_near(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = one(lambda arguments: arguments.number("--temperature"))
    with pytest.raises(SystemExit) as ended:
        arguments.parse_args(["--tempature", "3"])
    assert ended.value.code == 2
    assert "unrecognized arguments: --tempature 3: did you mean --temperature? (see " in capsys.readouterr().err


def test_the_help_is_the_docstring_and_names_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = one(lambda arguments: arguments.whole("--it", "how many", 7))
    with pytest.raises(SystemExit) as ended:
        arguments.parse_args(["--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "\nDoes it.\n\n    symphony run it 7\n" in out
    assert "how many (default: 7)" in out


@pytest.mark.slow
@pytest.mark.parametrize("how", ["", "@(lambda main: lambda arguments: main(arguments))\nasync "])
def test_a_command_runs_where_its_file_was_started_and_not_where_it_is_imported(tmp_path: Path, how: str) -> None:
    source = f"""'''Doubles it.'''
import libsym as sym

@sym.command
{how}def main(arguments):
    arguments.whole("it")
    sym.send_to_user(2 * arguments.parse_args().it)
"""
    (tmp_path / "double.py").write_text(source)
    most = [["double.py", "x"], ["-m", "cProfile", "double.py", "--help"]] if not how else []
    ran = [
        subprocess.run([sys.executable, *words], cwd=tmp_path, check=False, capture_output=True, text=True)
        for words in (["double.py", "21"], ["-c", "import double"], *most)
    ]
    assert [(each.returncode, each.stdout) for each in ran[:2]] == [(0, "42\n"), (0, "")]
    if most:  # the profiler is what sys.modules has by the name of __main__
        found = [(each.returncode, "Doubles it." in each.stdout) for each in ran[2:]]
        assert found == [(2, False), (0, True)]


def test_a_program_of_the_users_own_is_named_by_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["./mine.py"])
    assert sym.Arguments("Does it.").prog == "symphony run ./mine.py"
