"""The child of an Interpreter: shuts itself in, and then runs the code that it is sent. It imports nothing of libsym.

Run as `python -I -S confined.py LIMITS`, by `libsym/interpreter.py` alone. Before the first line of foreign code runs,
the kernel holds it: Landlock lets it read the standard library and what was named, and write nothing; a filter lets
through the system calls that computing and reading take, and no others (no socket, no process, no signal to others);
limits hold memory and open files. What it lacks of that it says, and ends.

Messages are lines of JSON. In: {} once, then {"code": TEXT}, and {"result": X} or {"error": TEXT} for a call. Out:
{"ready": true}, {"refused": TEXT}, {"call": NAME, "args": [...], "kwargs": {...}}, {"output": TEXT}.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import io
import json
import os
import platform
import resource
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Any

ALLOWED_CALLS = """
    read=0 write=1 close=3 stat=4 fstat=5 lstat=6 poll=7 lseek=8 mmap=9 mprotect=10 munmap=11 brk=12 rt_sigaction=13
    rt_sigprocmask=14 rt_sigreturn=15 pread64=17 readv=19 writev=20 access=21 select=23 sched_yield=24 mremap=25
    madvise=28 nanosleep=35 getpid=39 exit=60 uname=63 getcwd=79 readlink=89 gettimeofday=96 getrusage=98
    times=100 getuid=102 getgid=104 geteuid=107 getegid=108 sigaltstack=131 arch_prctl=158 gettid=186 futex=202
    sched_getaffinity=204 getdents64=217 set_tid_address=218 clock_gettime=228 clock_getres=229 clock_nanosleep=230
    exit_group=231 newfstatat=262 readlinkat=267 pselect6=270 set_robust_list=273 getrandom=318 statx=332
    rseq=334 faccessat2=439
"""
"""All others fail with EPERM, but fcntl(2) to read and set flags of descriptors: F_SETOWN would send signals to others;
and openat(2) to read. What may be read is Landlock's affair. It is no guard against O_TRUNC: a version before 3 does
not know it, and a file system in user space, like the mount, has emptied the file before Landlock is asked."""
FCNTL, F_GETFL, OPENAT = 72, 3, 257
WRITES = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC
AUDIT_X86_64, EPERM, X32_BIT = 0xC000003E, 1, 0x40000000
LOAD, JUMP_EQUAL, JUMP_ABOVE, JUMP_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x25, 0x35, 0x45, 0x06
KILL, ALLOW, FAIL = 0x80000000, 0x7FFF0000, 0x00050000 | EPERM
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, FILTER = 38, 22, 2
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
READ_FILE, READ_DIR = 1 << 2, 1 << 3
RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""Rights on files that a version of Landlock knows, and those of a later one that they hold for."""
MAX_OUTPUT_CHARS = 1 << 16
MAX_RAISED_CHARS = 1000


class RefusedError(Exception):
    """The kernel can't hold what would run here."""


def shut_in(readable: list[str], memory_bytes: int) -> None:
    if platform.machine() != "x86_64" or sys.platform != "linux":
        raise RefusedError(f"an Interpreter needs Linux on x86-64, not {sys.platform} on {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    # The interpreter lies in its prefix, with the standard library; what that is linked with lies in the others.
    own = [f"{sys.base_prefix}/lib", "/usr/lib", "/lib", "/lib64", "/usr/lib64"]
    for each, limit in ((resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(each, (limit, limit))
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise RefusedError("this kernel has no no_new_privs")
    restrict_files(libc, [path for path in own if os.path.isdir(path)], readable)  # noqa: PTH112 - before any import
    restrict_calls(libc)


def restrict_files(libc: Any, own: list[str], readable: list[str]) -> None:
    version = libc.syscall(LANDLOCK_CREATE, None, 0, 1)
    if version < 1:
        raise RefusedError(
            "this kernel has no Landlock, which holds an Interpreter's code: Linux 5.13 or newer, with lsm=landlock"
        )
    handled = RIGHTS[max(known for known in RIGHTS if known <= version)]
    ruleset = libc.syscall(LANDLOCK_CREATE, struct.pack("Q", handled), 8, 0)
    if ruleset < 0:
        raise RefusedError(f"Landlock refused a ruleset: {os.strerror(ctypes.get_errno())}")
    for path in own + readable:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rights = READ_FILE | (READ_DIR if os.path.isdir(path) else 0)  # noqa: PTH112
        if libc.syscall(LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", rights, place), 0):
            raise RefusedError(f"{path}: Landlock refused it: {os.strerror(ctypes.get_errno())}")
        os.close(place)
    if libc.syscall(LANDLOCK_RESTRICT, ruleset, 0):
        raise RefusedError(f"Landlock can't be entered here: {os.strerror(ctypes.get_errno())}")
    os.close(ruleset)


def restrict_calls(libc: Any) -> None:
    numbers = [int(word.partition("=")[2]) for word in ALLOWED_CALLS.split()]
    program = [  # what to do, how many lines to leave out if so and if not, with what
        (LOAD, 0, 0, 4),  # the architecture
        (JUMP_EQUAL, 1, 0, AUDIT_X86_64),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, 0),  # the number
        (JUMP_LEAST, len(numbers) + 6, 0, X32_BIT),
        *((JUMP_EQUAL, len(numbers) + 6 - index, 0, number) for index, number in enumerate(numbers)),
        (JUMP_EQUAL, 0, 2, OPENAT),
        (LOAD, 0, 0, 32),  # its third argument
        (JUMP_ANY_BIT, 3, 4, WRITES),
        (JUMP_EQUAL, 0, 2, FCNTL),
        (LOAD, 0, 0, 24),  # its second argument
        (JUMP_ABOVE, 0, 1, F_GETFL),
        (RETURN, 0, 0, FAIL),
        (RETURN, 0, 0, ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    filters = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code)))
    if libc.prctl(PR_SET_SECCOMP, FILTER, filters, 0, 0):
        raise RefusedError(f"this kernel takes no filter of system calls: {os.strerror(ctypes.get_errno())}")


class Printed(io.StringIO):
    """What the code prints, up to a limit."""

    def write(self, text: str) -> int:
        room = MAX_OUTPUT_CHARS - self.tell()
        if len(text) > room:
            super().write(text[: max(room, 0)])
            raise MemoryError(f"more than {MAX_OUTPUT_CHARS} characters of output")
        return super().write(text)


def execute(code: str, names: dict[str, Any]) -> tuple[str, str | None]:
    """Run code as a prompt would: what it prints, the value of a last expression, and the error that ended it.

    The second part is that error in one line; None: the code ran to its end.
    """
    printed = Printed()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            parsed = ast.parse(code, "<code>")
            last = parsed.body.pop() if parsed.body and isinstance(parsed.body[-1], ast.Expr) else None
            exec(compile(parsed, "<code>", "exec"), names)  # noqa: S102 - this is what it is for
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), "<code>", "eval"), names)  # noqa: S307
                if value is not None:
                    print(repr(value))
        except BaseException as error:  # noqa: BLE001 - SystemExit, too: it ends the code, not the interpreter
            lines = traceback.format_exception(error)
            own = [line for line in lines if __file__ not in line]
            raised = traceback.format_exception_only(error)[-1].strip()[:MAX_RAISED_CHARS]
            return (printed.getvalue() + "".join(own))[: MAX_OUTPUT_CHARS + 10_000], raised
    return printed.getvalue(), None


def main() -> None:
    lines_in, lines_out = sys.stdin.buffer, sys.stdout.buffer

    def send(message: dict[str, Any]) -> None:
        lines_out.write(json.dumps(message).encode() + b"\n")
        lines_out.flush()

    def receive() -> dict[str, Any]:
        line = lines_in.readline()
        if not line:
            os._exit(0)  # the program has gone
        found: dict[str, Any] = json.loads(line)
        return found

    def stub(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            send({"call": name, "args": args, "kwargs": kwargs})
            answer = receive()
            if "error" in answer:
                raise RuntimeError(answer["error"])
            return answer["result"]

        call.__name__ = name
        return call

    limits = json.loads(sys.argv[1])
    receive()
    try:
        shut_in(limits["readable"], limits["memory_bytes"])
    except (RefusedError, OSError) as error:
        send({"refused": str(error)})
        return
    names: dict[str, Any] = {"__name__": "__main__", **{name: stub(name) for name in limits["functions"]}}
    send({"ready": True})
    while True:
        output, raised = execute(receive()["code"], names)
        send({"output": output, "raised": raised})


if __name__ == "__main__":
    main()
