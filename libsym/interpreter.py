"""Code that a model has written, run where it can do no harm: a process that the kernel has shut in.

The child (`libsym/confined.py`) shuts itself in before it runs anything. This half starts it, sends it code, answers
the calls of functions that the program lends it, and ends it when its time is over. Whatever comes from it is data.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack
from weakref import finalize

from libsym.arguments import int64, real, shown
from libsym.chat import Chat
from libsym.errors import Invalid, NotSupported, one_line
from libsym.generate import AskOptions

_CHILD = Path(__file__).with_name("confined.py")
_MAX_LINE_BYTES = 1 << 20
_MAX_OUTPUT_CHARS = 80_000  # of the code's output and its traceback, which the child cuts itself unless it lies
_START_S = 30.0
_LEAST_MEMORY_BYTES = 64 << 20
_MAX_S = 1_000_000
"""Of one run: poll(2) takes 24 days at most."""


class Interpreter:
    r"""Runs Python code of a model's, confined by the kernel; its variables stay from one run to the next.

    >>> def double(x):
    ...     return 2 * x
    >>> with sym.Interpreter({"double": double}) as python:
    ...     python.run("x = double(21)")
    ...     python.run("print('x is', x)")
    ...     python.run("open('/etc/passwd')").splitlines()[-1]
    ''
    'x is 42\n'
    "PermissionError: [Errno 13] Permission denied: '/etc/passwd'"

    `functions`: of the program, which the code may call; what they take and give goes as JSON, and what they raise is a
    RuntimeError there. `read`: files and directories that it may read beside the standard library. `seconds`: of the
    code's own, for one run; `memory`: bytes, in all.

    The code has no sockets, so neither a network nor the daemon, writes no file, starts no process and no thread, and
    reaches no other process. Landlock and seccomp hold that; where the kernel lacks them it is NotSupported. One thread
    at a time may use it; an event loop does so by `anyio.to_thread.run_sync(python.run, code)`.
    """

    raised: str | None = None
    """The error that ended the last code, in one line; None: the code ran to its end, whatever it printed."""

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]] | None = None,
        *,
        read: Iterable[str | os.PathLike[str]] = (),
        seconds: float = 5.0,
        memory: int = 256 << 20,
    ) -> None:
        self._functions = dict(functions or {})
        self._seconds = real(seconds, "seconds")
        memory = int64(memory, "memory")
        if not 0 < self._seconds <= _MAX_S or memory < _LEAST_MEMORY_BYTES:
            raise Invalid(
                f"Interpreter: seconds={seconds} and memory={memory}: more than 0 and at most {_MAX_S}, and 64 MiB at "
                "least"
            )
        if not all(isinstance(name, str) and name.isidentifier() for name in self._functions):
            raise Invalid(f"Interpreter: functions are named as in Python, not {shown(list(self._functions))}")
        readable = [os.path.realpath(path) for path in read]
        limits = {"functions": list(self._functions), "readable": readable, "memory_bytes": memory}
        self._command = [sys.executable, "-I", "-S", str(_CHILD), json.dumps(limits)]
        self._child: subprocess.Popen[bytes] | None = None
        self._end: finalize[..., Any] | None = None
        self._received = b""

    def __repr__(self) -> str:
        functions = ", ".join(self._functions) or "no functions"
        return f"<Interpreter with {functions}: {'running' if self._child else 'not running'}>"

    def run(self, code: str) -> str:
        r"""Runs code as a prompt would: what it printed, the value of a last expression, the traceback of an error.

        Code that takes longer than `seconds`, or ends its process, is told so, and the next run begins without its
        variables. More than 64 Ki characters of output are an error of the code.

        >>> with sym.Interpreter(seconds=0.5) as python:
        ...     python.run("1 + 1")
        ...     python.run("while True: pass")
        '2\n'
        'the code was ended after 0.5 s: its variables are gone\n'
        """
        if not isinstance(code, str):
            raise Invalid(f"run({shown(code)}): code is text")
        child = self._child or self._start()
        child.send_signal(signal.SIGCONT)
        left_s, said = self._seconds, {"code": code}
        while True:
            begin_s = time.monotonic()
            message = self._exchange(said, left_s)
            left_s -= time.monotonic() - begin_s  # what the program's own functions take is not the code's
            match message:
                case str():
                    self.close()
                    self.raised = f"the code {message}"
                    return f"{self.raised}: its variables are gone\n"
                case {"output": str(text), "raised": str() | None as raised}:
                    _stop(child)  # code that only says that it is over computes no more
                    self.raised = None if raised is None else one_line(raised[:_MAX_OUTPUT_CHARS])
                    return text[:_MAX_OUTPUT_CHARS].encode(errors="replace").decode()  # half a surrogate is no text
                case {"call": str(name), "args": list(args), "kwargs": dict(kwargs)} if name in self._functions:
                    said = self._answer(self._functions[name], args, kwargs)
                case _:
                    self.close()
                    self.raised = "the code broke what it was run by"
                    return f"{self.raised}: its variables are gone\n"

    def ask(self, chat: Chat, question: str, **options: Unpack[AskOptions]) -> tuple[str, str]:
        r"""Has the model answer with code, and runs that: the code, and what `run` gives. `options`: as in `Chat.ask`.

        `raised` says whether the code failed.

        >>> chat, form = sym.Chat(sym.kv_create()), sym.Grammar.regex("1[+]1")
        >>> with sym.Interpreter() as python:
        ...     code, printed = python.ask(chat, "What is 1 + 1?", grammar=form)
        ...     code, printed, python.raised
        ('1+1', '2\n', None)
        """
        fence = "```"  # the block stays whole in the conversation: a model goes on as it began
        how: AskOptions = {"stop": f"\n{fence}", "keep_stop": True, **options}
        code = chat.ask(question, begin=f"{fence}python\n", **how).full_text()
        return code, self.run(code)

    def close(self) -> None:
        """Ends the process; the next run starts another one.

        >>> python = sym.Interpreter()
        >>> python.run("x = 1")
        ''
        >>> python.close()
        >>> python.run("x").splitlines()[-1]
        "NameError: name 'x' is not defined"
        """
        self._child, self._received = None, b""
        if self._end is not None:
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        self.close()

    def _start(self) -> subprocess.Popen[bytes]:
        # In a group of its own: it hears no Ctrl-C, and the kernel ends it with the program, also while it is stopped.
        child = self._child = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            cwd="/",
            process_group=0,
        )
        assert child.stdin is not None
        os.set_blocking(child.stdin.fileno(), False)
        self._end = finalize(self, _end, child)
        match self._exchange({}, _START_S):
            case {"ready": True}:
                return child
            case {"refused": str(reason)}:
                self.close()
                raise NotSupported(reason)
            case message:
                self.close()
                raise NotSupported(f"the Interpreter's process did not start: it {shown(message)}")

    @staticmethod
    def _answer(function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """What a function of the program gives, as the code is told. Its errors are the code's to see."""
        try:
            result = function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - the model is to read what went wrong
            return {"error": f"{type(error).__name__}: {error}"}
        try:
            json.dumps(result)
        except (TypeError, ValueError, RecursionError) as error:
            return {"error": f"the function gave what JSON can't say: {error}"}
        return {"result": result}

    def _exchange(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any] | str:
        """Sends a message, and gives the next that comes; or says what became of the code."""
        assert self._child is not None
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        stdin, stdout = self._child.stdin.fileno(), self._child.stdout.fileno()
        left = json.dumps(message).encode() + b"\n"
        late = f"was ended after {self._seconds:g} s"
        if timeout_s < 0:
            return late  # there may be more to read, without end
        end_s = time.monotonic() + timeout_s
        while left or b"\n" not in self._received:
            poll = select.poll()
            if left:
                poll.register(stdin, select.POLLOUT)
            if b"\n" not in self._received:
                poll.register(stdout, select.POLLIN)
            ready = dict(poll.poll(1e3 * max(0.0, end_s - time.monotonic())))
            if not ready:
                return late
            if stdin in ready:
                try:
                    left = left[os.write(stdin, left) :]
                except BrokenPipeError:
                    left = b""  # it has ended: the next part says so
            if stdout in ready:
                part = os.read(stdout, 1 << 16)
                if not part:
                    return "ended its process"
                self._received += part
                if len(self._received) > _MAX_LINE_BYTES:
                    return "sent too long a message"
        line, _, self._received = self._received.partition(b"\n")
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            return "wrote into the pipe to its program"
        return found if isinstance(found, dict) else "wrote into the pipe to its program"


def _stop(child: subprocess.Popen[bytes]) -> None:
    """Returns when it has stopped: had the program ended before that, the kernel would not end the child with it."""
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for stream in (child.stdin, child.stdout):
        assert stream is not None
        stream.close()
