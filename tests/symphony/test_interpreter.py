"""An Interpreter: the abilities of the model's code, and the limits that the kernel enforces."""

import json
import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

import libsym as sym
from tests.symphony.launchers import ROOT


@pytest.fixture
def python():
    with sym.Interpreter(seconds=20) as python:
        yield python


def last_line(text):
    return text.splitlines()[-1]


def test_it_computes_prints_and_remembers(python):
    assert python.run("import math\nx = [math.factorial(n) for n in range(5)]") == ""
    assert python.run("print(sum(x))\nx[-1]") == "34\n24\n"
    assert python.run("def f(n):\n    return n + 1\nf(1)") == "2\n"


def test_errors_are_text_for_the_model(python):
    said = python.run("print('before')\n1 / 0")
    assert said.startswith("before\nTraceback")
    assert last_line(said) == "ZeroDivisionError: division by zero"
    assert "confined.py" not in said
    assert "SyntaxError" in python.run("1 +")
    assert last_line(python.run("raise SystemExit(3)")) == "SystemExit: 3"
    assert python.run("2") == "2\n", "an error ends the code, not the interpreter"


def test_functions_of_the_program_are_called_with_what_json_can_say():
    seen = []

    def look(name, *, times=1):
        seen.append((name, times))
        if name == "bad":
            raise ValueError("no such thing")
        return {"name": name} if name != "odd" else {1, 2}

    with sym.Interpreter({"look": look}) as python:
        assert python.run("look('a', times=2)['name']") == "'a'\n"
        assert last_line(python.run("look('bad')")) == "RuntimeError: ValueError: no such thing"
        assert "JSON" in last_line(python.run("look('odd')"))
        assert python.run("try:\n    look('bad')\nexcept RuntimeError:\n    print('caught')") == "caught\n"
        assert "TypeError" in last_line(python.run("look(object())"))
    assert seen == [("a", 2), ("bad", 1), ("odd", 1), ("bad", 1)]


ESCAPES = {
    "a socket": "import socket\nsocket.socket()",
    "a socket of the system": "import socket\nsocket.socket(socket.AF_UNIX)",
    "a pair of sockets": "import socket\nsocket.socketpair()",
    "a file to write": "open('/tmp/escaped', 'w')",
    "a file for ioctl": "import os\nos.open('{own}', os.O_ACCMODE)",
    "a file of the mount to empty": "import os\nos.open('{mount}/secret.txt', os.O_TRUNC)",
    "a file of the program's": "open('{own}').read()",
    "what the program is": "open('/proc/{pid}/environ', 'rb').read()",
    "its own memory file": "open('/proc/self/mem', 'r+b')",
    "a process": "import os\nos.fork()",
    "a program in its place": "import os\nos.execv('/bin/true', ['true'])",
    "a thread": "import threading\nthreading.Thread(target=print).start()",
    "a signal to the program": "import os\nos.kill({pid}, 9)",
    "a signal by a descriptor": "import fcntl\nfcntl.fcntl(0, fcntl.F_SETOWN, {pid})",
    "a signal by its flags": "import fcntl, os\nfcntl.fcntl(0, fcntl.F_SETFL, os.O_ASYNC)",
    "a signal to itself": "import os\nos.kill(os.getpid(), 9)",
    "to remove a file": "import os\nos.unlink('{own}')",
    "to make a directory": "import os\nos.mkdir('/tmp/escaped')",
    "another mode": "import os\nos.chmod('{own}', 0o777)",
    "a link": "import os\nos.link('{own}', '/tmp/escaped')",
    "shared memory": "from multiprocessing import shared_memory\nshared_memory.SharedMemory(create=True, size=10)",
    "more memory": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "another user": "import os\nos.setuid(0)",
    "a namespace": "import ctypes\nassert ctypes.CDLL(None, use_errno=True).unshare(0x10000000) == 0",
    "ptrace": "import ctypes\nassert ctypes.CDLL(None).ptrace(16, {pid}, 0, 0) == 0",
    "io_uring": "import ctypes\nassert ctypes.CDLL(None).syscall(425, 8, 0) >= 0",
    "a message queue": "import ctypes\nassert ctypes.CDLL(None).syscall(240, b'x', 0o102, 0o600, 0) >= 0",
    "a call of the other ABI": "import ctypes\nassert ctypes.CDLL(None).syscall(0x40000000 + 41, 1, 1, 0) >= 0",
    "all of the memory": "x = bytearray(1 << 30)",
    "the daemon": "import sys\nsys.path.insert(0, '{root}')\nimport libsym\nlibsym.connect('{socket}')",
}


def test_the_kernel_lets_the_code_have_none_of_these(shared, python, tmp_path):
    own, secret = tmp_path / "own.txt", shared.mount / "secret.txt"
    own.write_text("private")
    secret.write_text("secret")
    places = {"own": own, "pid": os.getpid(), "mount": shared.mount, "socket": shared.socket, "root": ROOT}
    for wish, code in ESCAPES.items():
        assert "Error" in last_line(python.run(code.format(**places))), wish
        assert python.run("1 + 1") == "2\n", "and goes on"
        assert (own.read_text(), secret.read_text()) == ("private", "secret"), wish
        assert not Path("/tmp/escaped").exists(), wish


def test_it_reads_what_it_was_given_and_nothing_beside_that(shared, tmp_path):
    given, on_mount = tmp_path / "given", shared.mount / "given.txt"
    given.mkdir()
    for path, content in ((given / "a.txt", "a"), (tmp_path / "b.txt", "b"), (on_mount, "given")):
        path.write_text(content)
    (given / "out").symlink_to(tmp_path / "b.txt")
    with sym.Interpreter(read=[given, on_mount]) as python:
        assert python.run(f"import os\nos.listdir('{given}'), open('{given}/a.txt').read()") == (
            f"({os.listdir(given)}, 'a')\n"  # noqa: PTH208 - in the order that the code sees
        )
        assert python.run(f"open('{on_mount}').read()") == "'given'\n"
        for refused in (
            *(f"open('{tmp_path}/b.txt')", f"open('{given}/../b.txt')", f"open('{given}/out')"),
            f"open('{given}/a.txt', 'w')",
            *(
                f"os.open('{on_mount}', {flags})"
                for flags in ("os.O_TRUNC", "os.O_ACCMODE | os.O_TRUNC", "os.O_WRONLY", "os.O_RDWR | os.O_TRUNC")
            ),
        ):
            assert "PermissionError" in python.run(refused), refused
    assert on_mount.read_text() == "given"
    with sym.Interpreter(read=["/nowhere/at/all"]) as python, pytest.raises(sym.NotSupported, match="/nowhere/at/all"):
        python.run("1")


def test_descriptors_and_variables_of_the_program_are_not_there(monkeypatch):
    monkeypatch.setenv("API_KEY", "secret")
    listening = socket.socket()
    os.set_inheritable(listening.fileno(), True)
    with sym.Interpreter() as python:
        assert python.run("import os\ndict(os.environ).get('API_KEY')") == ""
        code = "for n in range(64):\n    try: os.fstat(n) and print(n)\n    except OSError: pass"
        assert python.run(code) == "0\n1\n2\n"
    listening.close()


@pytest.mark.slow
def test_code_that_takes_too_long_by_itself_is_ended_and_the_next_begins_anew():
    with sym.Interpreter(seconds=0.3) as python:
        python.run("x = 1")
        assert python.run("while True:\n    pass") == "the code was ended after 0.3 s: its variables are gone\n"
        assert "NameError" in python.run("x")
    with sym.Interpreter({"slow": lambda: threading.Event().wait(0.8)}, seconds=0.5) as python:
        assert python.run("slow()") == "False\n"


def test_output_without_end_is_cut_and_what_comes_out_is_text(python):
    said = python.run("while True:\n    print('x' * 1000)")
    assert last_line(said).startswith("MemoryError: more than 65536 characters")
    assert len(said) < 80_000
    assert python.run("print('a' + chr(0xD800))") == "a?\n"
    fake = "import os\nos.write(1, b'{\"raised\": null, \"output\": \"' + b'x' * 900_000 + b'\"}\\n')\nwhile True: pass"
    assert python.run(fake) == "x" * 80_000


GARBAGE = (
    r"b'[]\n'",
    r"""b'{"call": "exec", "args": [], "kwargs": {}}\n'""",
    r"""b'{"output": 3, "raised": None}\n'""",
    r"b'[' * 100_000 + b'\n'",
    "b'y' * 3_000_000",
)


def test_what_the_code_writes_into_the_pipe_is_data(python):
    for garbage in GARBAGE:
        said = python.run(f"import os\ndata = {garbage}\nwhile True:\n    os.write(1, data)")
        assert said.startswith("the code "), garbage
        assert said.endswith("its variables are gone\n"), garbage
        assert python.run("1") == "1\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "calls"), [("x", "while True: os.write(1, line)"), ("x" * 300_000, "os.write(1, line)")]
)
def test_code_that_calls_and_reads_no_answer_is_ended_as_well(given, calls):
    with sym.Interpreter({"f": lambda: given}, seconds=0.5) as python:
        line = json.dumps({"call": "f", "args": [], "kwargs": {}})
        said = python.run(f"import os\nline = {line.encode()!r} + b'\\n'\n{calls}\nwhile True: pass")
        assert said == "the code was ended after 0.5 s: its variables are gone\n"
        assert python.run("len(f())") == f"{len(given)}\n"


def writes(message, then="while True: pass"):
    """Code that writes a message of its own into the pipe."""
    return f"import os\nos.write(1, {json.dumps(message).encode()!r} + b'\\n')\n{then}"


@pytest.mark.slow
def test_code_that_only_says_that_it_is_over_computes_no_more():
    with sym.Interpreter(seconds=0.5) as python:
        assert python.run(writes({"output": "all is well", "raised": None})) == "all is well"
        assert python._child is not None
        state = Path(f"/proc/{python._child.pid}/stat")
        while state.read_text().rpartition(")")[2].split()[0] == "R":
            continue
        assert state.read_text().rpartition(")")[2].split()[0] == "T"
        assert "was ended after 0.5 s" in python.run("1")


@pytest.mark.slow
def test_code_that_does_not_read_what_it_is_sent_holds_nobody_up():
    """More than a pipe takes: what a function gives, and the next code."""
    with sym.Interpreter({"much": lambda: "x" * 500_000}, seconds=0.5) as python:
        assert python.run("len(much())") == "500000\n"
        assert "was ended after 0.5 s" in python.run(writes({"call": "much", "args": [], "kwargs": {}}))
        assert python.run(writes({"output": "done", "raised": None})) == "done"
        assert "was ended after 0.5 s" in python.run("1" + " " * 500_000)


def test_it_ends_with_its_program_however_that_ends(shared):
    source = """
        python = sym.Interpreter()
        python.run("1")
        print(python._child.pid, flush=True)
        if sys.argv[1] == "waits":
            sys.stdin.read()
        """
    for how in ("waits", "ends"):
        program = shared.program(source, how)
        child = Path(f"/proc/{int(program.stdout.readline())}")
        if how == "waits":
            program.kill()
        program.communicate(timeout=60)
        while child.exists() and "Z" not in child.joinpath("stat").read_text().rpartition(")")[2].split()[0]:
            continue


def test_a_process_that_ends_itself_is_told_of():
    with sym.Interpreter() as python:
        assert python.run("import os\nos._exit(0)") == "the code ended its process: its variables are gone\n"
        assert "variables are gone" in python.run("import ctypes\nctypes.string_at(0)")
        assert python.run("1") == "1\n"


def test_wrong_arguments_are_named():
    for wrong in ({"seconds": 0}, {"memory": 1}, {"functions": {"not a name": print}}):
        with pytest.raises(sym.Invalid):
            sym.Interpreter(**wrong)
    code: Any = b"1"
    with sym.Interpreter() as python, pytest.raises(sym.Invalid):
        python.run(code)


@pytest.mark.slow
def test_in_the_sandbox_of_a_program_it_holds_as_well(shared, tmp_path):
    program = tmp_path / "prog.py"
    program.write_text("""
import libsym as sym
with sym.Interpreter({"double": lambda x: 2 * x}) as python:
    for code in ("double(21)", "import socket\\nsocket.socket()", "open('/etc/passwd')", "import os\\nos.fork()"):
        print(python.run(code).splitlines()[-1].partition(":")[0])
""")
    said = shared.symphony("run", str(program)).stdout.splitlines()
    assert (said[0], [each for each in said if "Error" not in each]) == ("42", ["42"])
