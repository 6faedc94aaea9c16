"""Interpreter: runs code that a model has written, in a child process that the kernel confines.

The child (`confined.py`) confines itself before it runs any code. This module starts the child, sends code to it,
answers its calls of the program's functions, and ends it when its time is used up. The module trusts no message from
the child.
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
from libsym.calls.generate import AskOptions
from libsym.errors import Invalid, NotSupported, one_line
from libsym.tools.chat import Chat

_CHILD = Path(__file__).with_name("confined.py")
_MAX_LINE_BYTES = 1 << 20
_MAX_OUTPUT_CHARS = 80_000  # limit on output and traceback; an honest child keeps the limit itself
_START_S = 30.0
_LEAST_MEMORY_BYTES = 64 << 20
_MAX_S = 1_000_000
"""Upper bound of `seconds`: poll(2) waits for at most 24 days."""


class Interpreter:
    r"""Runner for Python code of a model, confined by the kernel. Variables stay from one run to the next.

    >>> def double(x):
    ...     return 2 * x
    >>> with sym.Interpreter({"double": double}) as python:
    ...     python.run("x = double(21)")
    ...     python.run("print('x is', x)")
    ...     python.run("open('/etc/passwd')").splitlines()[-1]
    ''
    'x is 42\n'
    "PermissionError: [Errno 13] Permission denied: '/etc/passwd'"

    `functions`: functions of the program that the code may call. Arguments and results are JSON values. An exception of
    such a function becomes a RuntimeError in the code.
    `read`: files and directories that the code may read, in addition to the standard library.
    `seconds`: limit for one run, without the time of the program's functions. `memory`: limit in bytes.

    The code cannot open sockets, so it reaches neither the network nor the daemon. The code cannot write files, start
    processes or threads, or reach other processes. Landlock and seccomp enforce this. NotSupported: the kernel lacks
    Landlock or seccomp. One thread at a time may use an Interpreter; in an event loop, use
    `anyio.to_thread.run_sync(python.run, code)`.
    """

    raised: str | None = None
    """The error that ended the last run, in one line. None: the code ran to its end."""

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
        r"""Run code as a Python prompt does; return its output.

        The output includes the value of a last expression, and the traceback of an error. If the code takes longer than
        `seconds`, or ends its process, the output says so, and its variables are lost. More than 64 Ki characters of
        output raise a MemoryError in the code.

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
            left_s -= time.monotonic() - begin_s  # the time of the program's functions does not count
            match message:
                case str():
                    self.close()
                    self.raised = f"the code {message}"
                    return f"{self.raised}: its variables are gone\n"
                case {"output": str(text), "raised": str() | None as raised}:
                    _stop(child)  # the code may have forged this message, and may still run
                    self.raised = None if raised is None else one_line(raised[:_MAX_OUTPUT_CHARS])
                    return text[:_MAX_OUTPUT_CHARS].encode(errors="replace").decode()  # replaces unpaired surrogates
                case {"call": str(name), "args": list(args), "kwargs": dict(kwargs)} if name in self._functions:
                    said = self._answer(self._functions[name], args, kwargs)
                case _:
                    self.close()
                    self.raised = "the code broke what it was run by"
                    return f"{self.raised}: its variables are gone\n"

    def ask(self, chat: Chat, question: str, **options: Unpack[AskOptions]) -> tuple[str, str]:
        r"""Ask a model a question that it answers with code, and run the code. Return the code and its output.

        `options` are the same as in `Chat.ask`. Afterwards `raised` has the error of the code, if the code failed.

        >>> chat, form = sym.Chat(sym.kv_create()), sym.Grammar.regex("1[+]1")
        >>> with sym.Interpreter() as python:
        ...     code, printed = python.ask(chat, "What is 1 + 1?", grammar=form)
        ...     code, printed, python.raised
        ('1+1', '2\n', None)
        """
        fence = "```"  # the whole block stays in the conversation, because a model imitates its earlier answers
        how: AskOptions = {"stop": f"\n{fence}", "keep_stop": True, **options}
        code = chat.ask(question, begin=f"{fence}python\n", **how).full_text()
        return code, self.run(code)

    def close(self) -> None:
        """End the child process. The next run starts a new process, without the old variables.

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
        # The child has its own process group, so Ctrl-C does not reach it. The kernel ends a stopped child with the
        # program.
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
        """Call a function of the program for the code; return the reply: the result, or the error."""
        try:
            result = function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - the code, and so the model, gets the error
            return {"error": f"{type(error).__name__}: {error}"}
        try:
            json.dumps(result)
        except (TypeError, ValueError, RecursionError) as error:
            return {"error": f"the function gave what JSON can't say: {error}"}
        return {"result": result}

    def _exchange(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any] | str:
        """Send a message to the child and return its next message, or a text that says how the child failed."""
        assert self._child is not None
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        stdin, stdout = self._child.stdin.fileno(), self._child.stdout.fileno()
        left = json.dumps(message).encode() + b"\n"
        late = f"was ended after {self._seconds:g} s"
        if timeout_s < 0:
            return late  # the child may send messages without end
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
                    left = b""  # the child has ended, as the read below shows
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
    """Stop the child, and wait until it has stopped. A child that still runs could outlive the program."""
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for stream in (child.stdin, child.stdout):
        assert stream is not None
        stream.close()
