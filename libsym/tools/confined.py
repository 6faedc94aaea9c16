"""The child process of an Interpreter: confines itself, and then runs the code that it receives.

Only `interpreter.py` runs this file, as `python -I -S confined.py LIMITS`. The file imports no module of libsym. Before
any foreign code runs, the kernel confines the process. Landlock allows reading of the standard library and of the named
files, and no writing. A seccomp filter allows the system calls for computing and reading, and no others. So there are
no sockets, no new processes, and no signals to other processes. Resource limits bound memory and open files. If the
kernel lacks any of these means, the child reports the lack and ends.

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
"""System calls that the filter allows without conditions. Two more are allowed in part. fcntl(2) may duplicate a
descriptor and read its flags, but not send signals to other processes by F_SETOWN. openat(2) may open for reading, and
Landlock decides which files. The filter refuses O_TRUNC, because Landlock before version 3 does not check it, and a
file system in user space, such as the mount, empties the file before Landlock checks the call. All other calls fail
with EPERM."""
FCNTL, F_GETFL, OPENAT = 72, 3, 257
WRITES = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC
AUDIT_X86_64, EPERM, X32_BIT = 0xC000003E, 1, 0x40000000
LOAD, JUMP_EQUAL, JUMP_ABOVE, JUMP_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x25, 0x35, 0x45, 0x06
KILL, ALLOW, FAIL = 0x80000000, 0x7FFF0000, 0x00050000 | EPERM
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, FILTER = 38, 22, 2
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
READ_FILE, READ_DIR = 1 << 2, 1 << 3
RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""Rights on files by version of Landlock. A version that is not listed has the rights of the version before it."""
MAX_OUTPUT_CHARS = 1 << 16
MAX_RAISED_CHARS = 1000


class RefusedError(Exception):
    """The kernel cannot confine the code."""


def shut_in(readable: list[str], memory_bytes: int) -> None:
    if platform.machine() != "x86_64" or sys.platform != "linux":
        raise RefusedError(f"an Interpreter needs Linux on x86-64, not {sys.platform} on {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    # The prefix has Python and the standard library. The other directories have the libraries that Python links with.
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
    program = [  # fields: instruction, lines to skip if true, lines to skip if false, operand
        (LOAD, 0, 0, 4),  # the architecture
        (JUMP_EQUAL, 1, 0, AUDIT_X86_64),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, 0),  # the number of the system call
        (JUMP_LEAST, len(numbers) + 6, 0, X32_BIT),
        *((JUMP_EQUAL, len(numbers) + 6 - index, 0, number) for index, number in enumerate(numbers)),
        (JUMP_EQUAL, 0, 2, OPENAT),
        (LOAD, 0, 0, 32),  # the flags of openat(2)
        (JUMP_ANY_BIT, 3, 4, WRITES),
        (JUMP_EQUAL, 0, 2, FCNTL),
        (LOAD, 0, 0, 24),  # the command of fcntl(2)
        (JUMP_ABOVE, 0, 1, F_GETFL),
        (RETURN, 0, 0, FAIL),
        (RETURN, 0, 0, ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    filters = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code)))
    if libc.prctl(PR_SET_SECCOMP, FILTER, filters, 0, 0):
        raise RefusedError(f"this kernel takes no filter of system calls: {os.strerror(ctypes.get_errno())}")


class Printed(io.StringIO):
    """Output of the code, held in memory. MemoryError: the output exceeds the limit."""

    def write(self, text: str) -> int:
        room = MAX_OUTPUT_CHARS - self.tell()
        if len(text) > room:
            super().write(text[: max(room, 0)])
            raise MemoryError(f"more than {MAX_OUTPUT_CHARS} characters of output")
        return super().write(text)


def execute(code: str, names: dict[str, Any]) -> tuple[str, str | None]:
    """Run code as a Python prompt does; return its output and its error.

    The output includes the value of a last expression, and the traceback of an error. The error is one line, or None if
    the code ran to its end.
    """
    printed = Printed()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            parsed = ast.parse(code, "<code>")
            last = parsed.body.pop() if parsed.body and isinstance(parsed.body[-1], ast.Expr) else None
            exec(compile(parsed, "<code>", "exec"), names)  # noqa: S102 - the purpose of this file
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), "<code>", "eval"), names)  # noqa: S307
                if value is not None:
                    print(repr(value))
        except BaseException as error:  # noqa: BLE001 - SystemExit, too, ends only the code, not the interpreter
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
            os._exit(0)  # the program has ended
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
