"""Worker processes that share the tests, as `--processes NUM` asks: forks of one process that has collected the tests.

Workers of pytest-xdist import and collect all tests once each, which takes six seconds of a processor for a worker.
A worker asks for a file of tests when it is done with one, so fixtures of a module are made once. Half of the workers
begin with the first file, the others with the last: tests that wait lie close together, and other tests compute then.
"""

import atexit
import io
import os
import pickle
import signal
import sys
import traceback
from collections import deque
from itertools import groupby, pairwise
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "SYMPHONY_TEST_WORKER"
"""Variable of the environment with the worker's number, for what workers must not share: users, ports."""
Groups = list[list[pytest.Item]]


def worker_number() -> int:
    """Return the number of this worker, or 0 if one process runs all tests."""
    return int(os.environ.get(VARIABLE, "0"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--processes", type=int, default=1, metavar="NUM", help="share the files of tests in NUM processes"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.processes > 1 and not config.option.collectonly:
        if config.option.usepdb:
            raise pytest.UsageError("--pdb needs one process: leave --processes out")
        config.pluginmanager.register(Workers(config.option.processes))


class Workers:
    """Workers of this process, which shows the reports that they send."""

    def __init__(self, num: int) -> None:
        self._num = num
        self._ends: dict[int, tuple[int, Connection]] = {}
        """Descriptor that tells of a worker's end: its process, and where its reports come."""
        self._running: dict[Connection, str] = {}
        """Tests that run now."""
        self._left = deque[int]()
        """Groups of tests that no worker has asked for yet."""
        self._status: int | None = None
        atexit.register(self._leave)  # the first to be registered, and the last to run

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed:  # in the collection, as pytest tells
            return None
        groups: Groups = [[*group] for _, group in groupby(session.items, lambda item: item.path)]
        self._left.extend(range(len(groups)))
        directory = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        try:
            for number in range(self._num):
                self._start(session, groups, directory / f"worker{number}")
            while self._ends:
                self._hear(session.config)
                if session.shouldfail or session.shouldstop:
                    raise session.Failed(session.shouldfail or session.shouldstop)
            if self._left:
                session.shouldfail = "all workers have ended, and files of tests are left"
                raise session.Failed(session.shouldfail)
        finally:
            for pid, _ in self._ends.values():
                os.kill(pid, signal.SIGINT)
            for pid, _ in self._ends.values():
                os.waitpid(pid, 0)
        return True

    def _start(self, session: pytest.Session, groups: Groups, directory: Path) -> None:
        theirs, ours = Pipe()
        pid = os.fork()
        if not pid:
            theirs.close()
            Worker(session, ours, directory).run(groups)
        ours.close()
        self._ends[os.pidfd_open(pid)] = pid, theirs

    def _hear(self, config: pytest.Config) -> None:
        """Wait for reports or ends, and show them."""
        reports = [worker for _, worker in self._ends.values()]
        ready = wait([*reports, *self._ends])
        for worker in reports:
            while worker.poll():
                try:
                    kind, told = pickle.loads(worker.recv_bytes())
                except (EOFError, ConnectionResetError):
                    break
                self._show(config, worker, kind, told)
        for end in self._ends.keys() & {*ready}:
            pid, worker = self._ends.pop(end)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            test = self._running.pop(worker, "")
            if status or test:
                text = f"a worker ended with status {status}: the rest of this file has not run"
                place = test.partition("::")[0], None, test
                report = pytest.TestReport(test, place, {}, "failed", text, "call")
                config.hook.pytest_runtest_logreport(report=report)
            os.close(end)
            worker.close()

    def _show(self, config: pytest.Config, worker: Connection, kind: str, told: Any) -> None:
        if kind == "report":
            report = config.hook.pytest_report_from_serializable(config=config, data=told)
            config.hook.pytest_runtest_logreport(report=report)
        elif kind == "next":
            is_first = told % 2 == 0
            worker.send(None if not self._left else self._left.popleft() if is_first else self._left.pop())
        elif kind == "start":
            self._running[worker] = told
        else:
            del self._running[worker]
            config.hook.pytest_runtest_logfinish(nodeid=told[0], location=told[1])

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._status = exitstatus

    def _leave(self) -> None:
        """End without freeing all objects, which takes two seconds."""
        if self._status is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1 if hasattr(sys, "last_value") else self._status)  # an error of pytest's end was told


class Worker:
    """Process that runs tests and sends their reports."""

    def __init__(self, session: pytest.Session, reports: Connection, directory: Path) -> None:
        self._session, self._reports = session, reports
        self._pid, config = os.getpid(), session.config
        atexit._clear()  # what is registered so far is the first process's affair
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ[VARIABLE] = directory.name.removeprefix("worker")
        directory.mkdir(mode=0o700)
        config._tmp_path_factory._basetemp = directory  # type: ignore[attr-defined]
        config.get_terminal_writer()._file = io.StringIO()  # the first process shows all
        capture: Any = config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()  # its files are shared
        capture.start_global_capturing()
        capture.suspend_global_capture()
        config.pluginmanager.register(self)

    def run(self, groups: Groups) -> None:
        """Run files until none is left, and end this process."""
        status = 1
        try:
            self._run(groups)
            status = 0
        except (KeyboardInterrupt, EOFError):  # the first process wants no more
            pass
        except BaseException:  # noqa: BLE001 - told, and this process ends
            traceback.print_exc()
        finally:
            if os.getpid() == self._pid:  # and not a process that a test has forked
                atexit._run_exitfuncs()
            os._exit(status)

    def _run(self, groups: Groups) -> None:
        protocol: Any = self._session.config.hook.pytest_runtest_protocol
        try:
            for number in iter(self._next, None):
                # The session as the next item ends all fixtures but its own. The next file is nobody's yet.
                for item, following in pairwise([*groups[number], self._session]):
                    self._send("start", item.nodeid)
                    protocol(item=item, nextitem=following)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            raise
        finally:
            self._session._setupstate.teardown_exact(None)

    def _next(self) -> int | None:
        self._send("next", worker_number())
        return self._reports.recv()

    def _send(self, kind: str, told: object) -> None:
        self._reports.send_bytes(pickle.dumps((kind, told)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        config = self._session.config
        self._send("report", config.hook.pytest_report_to_serializable(config=config, report=report))

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._send("end", (nodeid, location))
