"""The programs of one launcher: how they start, start again, and end."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from symphony.launcher import ending, processes, walls
from symphony.launcher.cgroup import Cgroups
from symphony.launcher.daemon_link import PROTOCOL, DaemonLink, Message
from symphony.launcher.finding import name_of
from symphony.launcher.forwarder import Forwarder
from symphony.launcher.history import History
from symphony.launcher.machine import Machine
from symphony.launcher.places import Places, Refused
from symphony.launcher.process import Process
from symphony.launcher.program import End, Program, Record
from symphony.launcher.spec import MAX_NAME, NOT_IN_NAMES, SOCKET_INSIDE, Spec
from symphony.launcher.streams import Streams
from symphony.launcher.watch import Watch, wall_bytes
from symphony.launcher.zygote_process import ZygoteProcess
from symphony.launcher.zygote_start import Started, start_zygote

log = logging.getLogger(__name__)

FIRST_RESTART_S, LONGEST_RESTART_S = 0.2, 30.0
"""Pauses before a program is started again; each is twice the one before."""
WINDOW = 24, 80
OWN_BYTES = 256 << 20
"""Bytes that a program in a sandbox may have in its own /tmp, /var/tmp and /dev/shm."""
_MAX_LISTENERS = 128
_KILLS, _KILL_AGAIN_S = 100, 0.005
"""What a lost zygote leaves is killed so often at most, so far apart: one that the kernel holds stops nobody else."""


class Supervisor:
    """Starts programs and looks after them; what clients and the daemon ask for ends here.

    `on_request` gets what the daemon asks. `on_idle` is called when a program has ended.
    """

    def __init__(
        self, places: Places, zygote: Started, on_request: Callable[[Message], None], on_idle: Callable[[], None]
    ) -> None:
        self._places = places
        self.history = History(places.programs)
        self.living: dict[str, Program] = {}
        self._cgroups = Cgroups.find(places.key)
        self._machine = Machine()
        self._watches: dict[str, Watch] = {}
        self.zygote = ZygoteProcess(zygote, self._zygote_lost)
        self.link = DaemonLink(places.programs_socket, self._tell_again, on_request, lambda: bool(self.living))
        self._on_idle = on_idle
        self._tasks: set[asyncio.Task[None]] = set()
        self._mount: str | None = None
        """Where KV is, by the daemon."""
        self._hidden: list[str] = []
        """Paths of the daemon's that no sandbox shows."""

    # Starting.

    async def start(
        self, spec: Spec, *, parent: str | None = None, outlives: bool = True, window: tuple[int, int] = WINDOW
    ) -> Program:
        """A program that runs. Refused: it can't; nothing is left of it. `outlives`: it does not end with `parent`."""
        self.link.connect()
        record = Record.of(spec, self._free_name(spec), parent, outlives=outlives)
        program = Program(self._places.programs / record.id, record, spec, window)
        self.living[record.id] = program
        try:
            program.listen(lambda _program, connection: self.link.pass_on(record.id, connection, program.closer))
            await self._admit(program, again=False)
            try:
                self._confine(program)
                process = await self._begin(program)
            except Refused as error:
                self.spawn(self._tell_end(program, End(error.status, "exit", 0)))
                raise
        except BaseException:
            self._give_up(program)
            raise
        self.spawn(self._look_after(program, process))
        self._watches[record.id] = Watch(program, self.ran_into, self._machine)
        return program

    def _confine(self, program: Program) -> None:
        """Makes the cgroups of an isolated program. Refused: the kernel makes no more."""
        spec = program.spec
        if spec.is_isolated and self._cgroups.kinds:
            program.group = self._cgroups.make(program.record.id, spec.memory, spec.tasks)
            program.group.watch_memory(lambda: self.ran_into(program, "memory"))

    def _give_up(self, program: Program) -> None:
        """Note that a program never ran."""
        del self.living[program.record.id]
        program.stop_listening()
        if program.group is not None:
            self.spawn(program.group.remove())
        if program.directory.exists():
            program.forget()

    async def _admit(self, program: Program, *, again: bool) -> None:
        """Tells the daemon that the program lives. Refused: its user has too many."""
        record, limits = program.record, program.spec.limits.of_the_daemon()
        words = {"id": record.id, "name": record.name, "pid": record.pid, "parent": record.parent, "limits": limits}
        answer = await self.link.call("start", **words, again=again, protocol=PROTOCOL)
        self._mount, self._hidden = answer.get("mount"), answer.get("hidden", [])

    async def _begin(self, program: Program) -> Process:
        """One process of the program, which the daemon is told of. Refused: there can be none."""
        record, spec = program.record, program.spec
        streams = Streams(
            program.log,
            has_input=spec.has_input,
            window=program.window if spec.tty else None,
            error_apart=spec.error_apart,
            on_output=program.changed,
        )
        try:
            process = await self._launch(program, streams)
        except BaseException:
            streams.abandon()
            raise
        streams.started()
        program.streams = streams
        if program.input_ended:
            streams.end_input()
        program.process = process
        record.pid, record.started = process.pid, time.time()
        program.save()
        self.spawn(self._tell_pid(program))
        return process

    async def _launch(self, program: Program, streams: Streams) -> Process:
        """The program's process, and the server of the hosts that it may connect to."""
        grants = program.spec.allow_net
        if not grants:
            return await self.zygote.launch(self._order(program), streams)
        door, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with door, theirs:
            process = await self.zygote.launch(self._order(program), streams, theirs)
            door.setblocking(False)
            _, fds, _, _ = socket.recv_fds(door, 1, _MAX_LISTENERS)
        program.forwarder = Forwarder(grants, program.say)
        program.forwarder.take([socket.socket(fileno=fd) for fd in fds])
        return process

    def _order(self, program: Program) -> dict[str, Any]:
        """Return the orders that the zygote's child reads."""
        spec = program.spec
        rlimits = dict(spec.rlimits)
        if spec.limits.memory is not None:
            wall = wall_bytes(spec.limits.memory)
            rlimits["RLIMIT_DATA"] = (wall, wall)
        path_of_socket = SOCKET_INSIDE if spec.is_isolated else str(program.socket_path)
        if spec.is_isolated:
            most = walls.descriptors(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
            soft, hard = rlimits.get("RLIMIT_NOFILE", (most, most))
            rlimits["RLIMIT_NOFILE"] = min(soft, most), min(hard, most)
        told = {"SYMPHONY_SOCKET": path_of_socket, processes.PROGRAM: program.record.id}
        own_bytes = min(OWN_BYTES, spec.limits.memory or OWN_BYTES)
        return {
            "isolation": spec.isolation,
            "shows": spec.shows,
            "home": spec.home,
            "empty": spec.empty,
            "allow_net": spec.allow_net,
            "venv": spec.venv,
            "ships": spec.ships,
            "mount": self._mount,
            "hidden": [str(self._places.directory.parent), *self._hidden],
            "socket": str(program.socket_path),
            "base": str(self._places.directory),
            "own_bytes": own_bytes,
            "tasks": spec.tasks,
            "path": spec.path,
            "python": spec.python,
            "args": spec.args,
            "env": {**spec.env, **told},
            "cwd": spec.cwd,
            "tty": spec.tty,
            "umask": spec.umask,
            "rlimits": rlimits,
            "memory": spec.limits.memory,
            "cgroups": [] if program.group is None else program.group.directories,
            "oom_score_adj": walls.OOM_SCORE_ADJ if spec.is_isolated else None,
        }

    def _free_name(self, spec: Spec) -> str:
        """NAME, NAME-2, …: no two living programs have the same."""
        wanted = spec.name or NOT_IN_NAMES.sub("_", name_of(spec.path))[:MAX_NAME] or "program"
        taken = {each.record.name for each in self.living.values()}
        name, number = wanted, 1
        while name in taken:
            number += 1
            name = f"{wanted}-{number}"
        return name

    # Living and ending.

    async def _look_after(self, program: Program, process: Process) -> None:
        pause_s = FIRST_RESTART_S
        while True:
            wait_status = await process.ended
            assert program.streams is not None
            program.streams.finish()
            program.changed()
            await program.streams.closed
            if program.forwarder is not None:
                await program.forwarder.finish()
                program.forwarder = None
            if wait_status != 0:
                await self._ask_limit(program)
            again = None
            if ending.may_start_again(program, ending.judge(program, wait_status)):
                again = await self._start_again(program, pause_s)
            if again is None:
                self._finish(program, ending.judge(program, wait_status))
                return
            process, pause_s = again, min(2 * pause_s, LONGEST_RESTART_S)

    async def _start_again(self, program: Program, pause_s: float) -> Process | None:
        """The next process of a program that failed; None: somebody ends it, or it can't be started any more.

        Where its daemon has gone it waits for the next one.
        """
        program.record.restarts += 1
        program.record.pid = program.process = None
        while not program.stopping.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(program.stopping.wait(), pause_s)
            if program.stopping.is_set() or not self.link.is_connected:
                continue
            try:
                return await self._begin(program)
            except Refused as error:
                program.say(f"{program.record.name} can't be started again: {error}")
                return None
        return None

    def _finish(self, program: Program, end: End) -> None:
        program.record.end = end
        self._watches.pop(program.record.id).stop()
        if program.group is not None:
            self.spawn(program.group.remove())
        if program.limit is not None:
            program.say(ending.told(program))
        program.stop_listening()
        program.save()
        program.log.close()
        del self.living[program.record.id]
        self.history.add(program)
        program.over.set()
        program.changed()
        self._on_idle()
        self.spawn(self._tell_end(program, end))
        for child in list(self.living.values()):
            if child.record.parent == program.record.id and not child.record.detached:
                self.spawn(ending.end(child))

    def ran_into(self, program: Program, what: str, last_words_s: float = 0.0) -> None:
        """The program has used more than it may."""
        if program.limit is None and not program.over.is_set():
            program.limit = what
            self.spawn(ending.end(program, last_words_s))

    def kill(self, program: Program, number: int) -> None:
        """A signal to the program's process group; one that ends it ends it for good. Refused: it is not there."""
        pid = program.record.pid
        if number not in _GO_ON:
            program.stopping.set()
        try:
            if pid is not None and not processes.send_group_signal(pid, number):
                raise Refused(f"{program.record.name} has ended", 1)
        except OSError as error:  # it has become another user's, or there is no such signal
            raise Refused(f"{program.record.name} can't be sent the signal: {error.strerror}", 1) from None

    def hang_up(self, program: Program) -> None:
        """The terminal that it ran on has gone."""
        program.stopping.set()
        program.input_ended = True
        if program.streams is not None:
            program.streams.end_input()
        with suppress(Refused):
            self.kill(program, signal.SIGHUP)
            self.kill(program, signal.SIGCONT)

    def find(self, word: str) -> Program:
        """By id, name or pid: a living program, else the last that ended. Refused: there is none."""
        for program in [*reversed(self.living.values()), *self.history.latest_first()]:
            record = program.record
            if word in (record.id, record.name, str(record.pid)):
                return program
        raise Refused(f"no program {word}: `symphony ps --all` shows all that there are", 1)

    async def end_all(self) -> None:
        """The launcher is told to end: its programs end first."""
        await asyncio.gather(*(ending.end(program) for program in list(self.living.values())))
        while self.living:
            await next(iter(self.living.values())).over.wait()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=ending.GRACE_S)
        self.link.close()
        self.zygote.close()

    def _zygote_lost(self) -> None:
        """The kernel ends its programs; what they made is ours now, and goes, too."""
        for _ in range(_KILLS):  # what forks meanwhile, too
            if not processes.end_tree(os.getpid()):
                break
            processes.reap()
            time.sleep(_KILL_AGAIN_S)
        self.zygote = ZygoteProcess(start_zygote(str(self._places.directory)), self._zygote_lost)

    # The daemon.

    async def _tell_pid(self, program: Program) -> None:
        with suppress(Refused):
            await self.link.call("pid", id=program.record.id, pid=program.record.pid)

    async def _ask_limit(self, program: Program) -> None:
        """A call that failed by a limit of the daemon's may have ended the program before word of it came here."""
        limits = program.spec.limits
        if program.limit is not None or (limits.tokens, limits.pages, limits.page_seconds) == (None, None, None):
            return
        with suppress(Refused):
            what = (await self.link.call("limit", id=program.record.id)).get("what")
            program.limit = program.limit or what

    async def _tell_end(self, program: Program, end: End) -> None:
        """The daemon's last word is what the program used."""
        try:
            words = {"id": program.record.id, "status": end.status, "reason": end.reason}
            answer = await self.link.call("end", **words)
        except Refused as error:
            log.info("the daemon does not take the end of %s: %s", program.record.name, error)
            return
        program.record.usage = answer.get("usage") or {}
        if program.directory.exists():
            program.save()

    def _tell_again(self) -> None:
        """A daemon that was started again is told of all programs that live."""
        for program in self.living.values():
            self.spawn(self._admit_again(program))

    async def _admit_again(self, program: Program) -> None:
        try:
            await self._admit(program, again=True)
        except Refused as error:
            log.warning("the daemon does not take %s again: %s", program.record.name, error)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Work that nobody waits for."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("this should not have failed", exc_info=task.exception())


_GO_ON = frozenset({0, signal.SIGCONT, signal.SIGSTOP, signal.SIGTSTP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH})
"""Signals that ask for no end."""
