"""Commands on programs of other machines of the fleet: run, ps, kill, logs, wait. A program there is MACHINE:NAME."""

from __future__ import annotations

import argparse
import json
import os
import queue
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

import libsym
from libsym.channel.socket_path import find_socket
from libsym.errors import Invalid, NotFound, SymError
from symphony.commands.options import connect, on_mount
from symphony.fleet.cluster import Cluster, Connection, MachineLost, Remote
from symphony.fleet.runner import ERRORS, OUTPUT, STATUS, Request, Source, run_options
from symphony.launcher.asking import commands, listing
from symphony.launcher.asking.session import PASSED_ON
from symphony.launcher.common.finding import find_program, shipped
from symphony.launcher.common.places import Refused
from symphony.launcher.common.statuses import LOST, NOT_READABLE, SIGNALLED

OPTIONS = ("name", "isolation", "bind", "allow-net", "venv", "memory", "processes", "tokens", "pages", "restart")
"""Options of `run` that another machine gets as they are."""
MAX_SOURCE_BYTES = 4 << 20
SIGNALS = (*PASSED_ON, signal.SIGHUP)
"""Signals that a command passes on. SIGHUP says that the command's terminal is gone."""
_GO_ON = frozenset({signal.SIGUSR1, signal.SIGUSR2})
"""Signals that don't ask a program to end."""

LEAVES_S = 20.0
"""Time within which a machine that has died leaves the list of its fleet: a lease, and two rounds of a daemon."""

# ---- run


def run_in_fleet(args: argparse.Namespace, socket: Path | None) -> int:
    """Run a program here, or by Ray on another machine. With --restart, start it elsewhere if that machine dies."""
    while True:
        machine, here = _machine(args)
        if machine == here:
            return commands.run_command(args, socket)
        try:
            return _run_on(machine, args)
        except MachineLost as error:
            if args.restart == "no" or args.on is not None or not _has_left(machine, args):
                raise Refused(str(error), LOST) from None
            print(f"symphony: {error}; {args.program} starts again", file=sys.stderr)


def _run_on(machine: str, args: argparse.Namespace) -> int:
    """Run a program on another machine."""
    if args.tty:
        raise Invalid(f"a program on another machine has no terminal here: leave --tty out, or run it on {machine}")
    ident = args.id or secrets.token_hex(4)
    request = _run_request(args, ident)
    with Cluster.of_user().connection() as connection:
        there = Elsewhere(connection, machine)
        if not args.detach:
            return there.run(request, ident, args.program)
        print(f"{machine}:{there.told(request).strip()}", file=connection.out)
        return 0


def _has_left(machine: str, args: argparse.Namespace) -> bool:
    """Return whether a machine has left the fleet, or leaves it soon. If not, only its Ray does not answer."""
    ends_s = time.monotonic() + LEAVES_S
    while True:
        connect(args)
        fleet = libsym.daemon_stat()["fleet"]
        libsym.close()
        if fleet["trouble"] or time.monotonic() > ends_s:
            return False
        if machine not in fleet["machines"]:
            return True
        time.sleep(1.0)


def _machine(args: argparse.Namespace) -> tuple[str, str]:
    """Return the machine for the program, and this machine."""
    here = _here(args)
    if args.on is not None:
        return args.on, here
    connect(args)
    mount = libsym.daemon_stat()["mount"]
    found = libsym.fleet_place(*(on_mount(each, mount) for each in args.near), begins=True)
    libsym.close()
    print(f"symphony: {args.program} runs on {found['machine']}: {found['reason']}", file=sys.stderr)
    return found["machine"], here


def _here(args: argparse.Namespace) -> str:
    """Return the name of this machine. NotFound: it is in no fleet. Invalid: the machine of `--on` is drained."""
    connect(args)
    fleet = libsym.daemon_stat().get("fleet")
    libsym.close()
    if fleet is None:
        raise NotFound("this daemon is in no fleet: see `etcd` in symphony.toml(5)")
    on = getattr(args, "on", None)
    if on in fleet.get("drained", ()):
        raise Invalid(f"{on} is drained: it gets no more programs")
    return str(fleet["machine"])


def _run_request(args: argparse.Namespace, ident: str) -> Request:
    """Return the command for the other machine: `symphony run --detach` with the options and the program's file.

    Names of programs are used again, so the program has an id that is known before it begins.
    """
    given: list[tuple[str, object]] = [(each, getattr(args, each.replace("-", "_"))) for each in OPTIONS]
    given.append(("time", None if args.time is None else f"{args.time:f}s"))
    given += [("id", ident), ("env-json", "/dev/stdin")]
    program, source = args.program, None
    if program not in shipped() or Path(program).is_file():
        file = Path(find_program(program, ".")[0])
        source = Source(ident, file.name, _content(file), os.access(file, os.X_OK))
        program = f"./{file.name}"
    words = ("run", "--detach", *run_options(given), program, *args.arguments)
    return Request(os.getuid(), words, source, json.dumps(commands.variables(args)).encode())


def _content(file: Path) -> bytes:
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_SOURCE_BYTES + 1)  # a device has no end
    except OSError as error:
        raise Refused(f"{file}: {error.strerror}", NOT_READABLE) from None
    if len(content) > MAX_SOURCE_BYTES:
        raise Invalid(f"{file} has more than {MAX_SOURCE_BYTES:,} bytes, the most for another machine")
    return content


# ---- ps, kill, logs, wait


def ps_in_fleet(args: argparse.Namespace, socket: Path | None) -> int:
    """List the programs on all machines of the fleet. Return 1 if a machine does not answer."""
    here = _here(args)
    daemon = socket or find_socket()
    found, missing = listing.rows(commands.places_of(daemon), str(daemon), ended=args.all)
    rows, failures = [{**each, "machine": here} for each in found], [] if missing is None else [str(missing)]
    try:
        with Cluster.of_user().connection() as connection:
            for machine in connection.machines():
                if machine != here:
                    rows += _rows_of(connection, machine, args, failures)
    except SymError as error:
        failures.append(str(error))
    named = [{**each, "name": f"{each['machine']}:{each['name']}"} for each in rows]
    print(json.dumps(rows, indent=2) if args.json else "\n".join(listing.lines(named)))
    for each in failures:
        print(f"symphony: programs are missing: {each}", file=sys.stderr)
    return 1 if failures else 0


def _rows_of(connection: Connection, machine: str, args: argparse.Namespace, failures: list[str]) -> list[listing.Row]:
    """Return the programs on another machine. If it does not answer, add the reason to `failures`."""
    try:
        there = Elsewhere(connection, machine)
        found, failure = there.result(_request("ps", "--json", *(["--all"] if args.all else [])))
    except SymError as error:
        failures.append(str(error))
        return []
    if failure is not None:
        failures.append(str(failure))
    return [{**each, "machine": machine} for each in json.loads(found or "[]")]


def act_elsewhere(command: str, args: argparse.Namespace) -> int:
    """Carry out `kill`, `logs` or `wait` on programs of other machines. Return the last status, also of an error."""
    programs = [args.who] if isinstance(args.who, str) else args.who
    for who in programs:
        machine, colon, name = who.partition(":")
        if not colon:
            raise Invalid(f"{who} is a program of this machine: name it in a command of its own")
        if not machine or not name:
            raise Invalid(f"{who!r} names no program of another machine: give MACHINE:NAME")
    status = 0
    with Cluster.of_user().connection() as connection:
        for who in programs:
            machine, _, name = who.partition(":")
            try:
                there = Elsewhere(connection, machine)
                if command == "kill":
                    there.kill(name, args.signal)
                elif command == "logs":
                    status = there.show(_request("logs", *(["--follow"] if args.follow else []), "--", name))
                else:
                    status = there.status(name)
                    print(status if len(programs) == 1 else f"{who} {status}", file=connection.out)
            except (SymError, Refused) as error:
                print(f"symphony: {error}", file=sys.stderr)
                status = error.status if isinstance(error, Refused) else 1
    return status


# ---- the other machine


def _request(*words: str) -> Request:
    return Request(os.getuid(), words)


class Unwritten(Refused):
    """Error: output can't be written, for instance to a full disk."""


class Elsewhere:
    """The user's programs on another machine."""

    def __init__(self, connection: Connection, machine: str) -> None:
        """NotConnected: the machine is in no Ray cluster of this user."""
        self._machine = machine
        self._out = connection.out
        self._remote = Remote(connection, machine)
        self._is_asked_to_end = False
        """Whether a signal has asked the program to end."""

    def result(self, request: Request) -> tuple[str, Refused | None]:
        """Return what a command there prints, and the error that its last line tells, if the command failed."""
        written = {STATUS: b"", OUTPUT: b"", ERRORS: b""}
        for stream, content in self._remote.call(request):
            written[stream] += content
        status, failure = int(written[STATUS]), None
        if status:
            lines = written[ERRORS].decode(errors="replace").strip().splitlines()
            line = (lines or [f"the command ended with {status}"])[-1]
            failure = Refused(f"{self._machine}: {line.removeprefix('symphony: ')}", status)
        return written[OUTPUT].decode(), failure

    def told(self, request: Request) -> str:
        """Return what a command there prints. Refused: the command failed."""
        output, failure = self.result(request)
        if failure is not None:
            raise failure
        return output

    def status(self, name: str) -> int:
        """Return the exit status of a program when it has ended."""
        output, failure = self.result(_request("wait", "--", name))
        if failure is not None and not output:
            raise failure
        return int(output)

    def kill(self, name: str, number: int) -> None:
        self.told(_request("kill", "--signal", str(number), "--", name))

    def show(self, request: Request) -> int:
        """Write the output of a command there to this command's streams, and return its exit status.

        BrokenPipeError: a stream has no reader. Unwritten: a stream takes no output.
        """
        for stream, content in self._remote.call(request):
            if stream == STATUS:
                return int(content)
            self._write(self._out if stream == OUTPUT else sys.stderr, content)
        raise AssertionError("a runner's last event is the exit status")

    def _write(self, stream: TextIO | None, content: bytes) -> None:
        """Write output. `stream`: None if the command was started with a closed one."""
        if stream is None:
            return
        try:
            stream.buffer.write(content)
            stream.buffer.flush()
        except OSError as error:
            if stream is self._out:
                with suppress(OSError):
                    stream.close()  # else the command's end would write again
            if isinstance(error, BrokenPipeError):
                raise
            raise Unwritten(f"what the program writes can't be passed on: {error.strerror}") from None

    def run(self, request: Request, ident: str, program: str) -> int:
        """Run a program, write its output until it ends, pass signals on to it, and return its exit status."""
        try:
            with self._passing_signals_on(ident) as begun:
                name = self.told(request).strip()
                begun.set()
                print(f"symphony: {program} is {self._machine}:{name}", file=sys.stderr)
                self.show(_request("logs", "--follow", "--", ident))
                return self.status(ident)
        except (BrokenPipeError, Unwritten) as error:  # as here, a program whose output has no reader is hung up
            with suppress(Refused):  # the program has ended
                self.kill(ident, signal.SIGHUP)
            if isinstance(error, Unwritten):
                raise
            return SIGNALLED + signal.SIGPIPE
        except MachineLost as error:
            if self._is_asked_to_end:
                raise Refused(str(error), LOST) from None
            raise

    @contextmanager
    def _passing_signals_on(self, ident: str) -> Iterator[threading.Event]:
        """Send the signals that arrive to the program, in a thread: a handler must not wait for the other machine.
        The caller sets the event when the program has begun. Signals that arrive before wait for it.
        """
        arrived, begun = queue.SimpleQueue[int](), threading.Event()

        def pass_on() -> None:
            begun.wait()
            while True:
                try:
                    self.kill(ident, arrived.get())
                except (SymError, Refused) as error:
                    print(f"symphony: a signal was not passed on: {error}", file=sys.stderr)

        def take(number: int, _frame: object) -> None:
            self._is_asked_to_end |= number not in _GO_ON
            arrived.put(number)

        threading.Thread(target=pass_on, daemon=True).start()
        nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        before = {each: signal.signal(each, take) for each in (PASSED_ON if nohup else SIGNALS)}
        try:
            yield begun
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
