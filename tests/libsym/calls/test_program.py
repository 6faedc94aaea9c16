"""`main` ends a program as a command ends, whether an error came of its own, of a coroutine, or of a task."""

import anyio
import pytest

import libsym as sym

ENDS = {
    "an error of the daemon is one line": (sym.NotFound("no.kv: no such file"), "prog: no.kv: no such file"),
    "an error of the system is one line": (
        FileNotFoundError(2, "No such file or directory", "/nowhere"),
        "prog: /nowhere: No such file or directory",
    ),
    "Ctrl-C": (KeyboardInterrupt(), 130),
    "a reader who has gone": (BrokenPipeError(), 141),
    "all is well": (None, 0),
}


@pytest.mark.parametrize(
    ("kind", "how"),
    [(kind, how) for kind in ENDS for how in ("def", "async def", "task") if (kind, how) != ("Ctrl-C", "task")],
)  # which asyncio turns into a cancellation
def test_a_program_ends_as_a_command_ends(kind, how, tmp_path, monkeypatch):
    error, status = ENDS[kind]

    def program():
        if error is not None:
            raise error

    async def coroutine():
        program()

    async def with_a_task():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(coroutine)

    monkeypatch.setattr("sys.argv", ["/somewhere/prog.py"])
    with (tmp_path / "out").open("w+") as out:
        monkeypatch.setattr("sys.stdout", out)
        with pytest.raises(SystemExit) as ended:
            sym.main({"def": program, "async def": coroutine, "task": with_a_task}[how])
        assert ended.value.code == status
        print("what is left", file=out, flush=True)
        is_written = (tmp_path / "out").stat().st_size > 0
        assert is_written == (status != 141), "the flush at exit does not fail, either"


def test_a_defect_shows_its_traceback():
    with pytest.raises(ZeroDivisionError):
        sym.main(lambda: 1 / 0)
