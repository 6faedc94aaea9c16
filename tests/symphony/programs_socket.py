"""A daemon's programs socket for tests of the launcher: it says yes, writes down what it was told, and asks."""

import array
import json
import socket
import threading
from contextlib import suppress
from pathlib import Path


class ProgramsSocket:
    """Beside `path`, the daemon's socket. Connections of programs are closed, or kept."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.told: list[dict] = []
        """Messages of launchers, in order."""
        self.refusals: dict[str, str] = {}
        """Requests to refuse: the error's text by the name of the request."""
        self.mount: str | None = None
        """Mount point that launchers are told."""
        self.keep_connections = False
        self.passed: list[socket.socket] = []
        """Connections of programs, if they are kept."""
        self._changed = threading.Condition()
        self._connections: list[socket.socket] = []
        self._answers: dict[int, dict] = {}
        self._last_number = 0
        self._listening: socket.socket | None = None
        self._threads: list[threading.Thread] = []
        self.start()

    def start(self) -> None:
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listening.bind(f"{self.path}.programs")
        listening.listen()
        self._listening = listening
        self._spawn(self._accept, listening)

    def _spawn(self, target, *args) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def stop(self) -> None:
        """Close all sockets, as if the daemon had been killed."""
        listening, self._listening = self._listening, None
        Path(f"{self.path}.programs").unlink()
        while self._connections:
            with suppress(OSError):
                self._connections.pop().shutdown(socket.SHUT_RDWR)
        while self.passed:
            self.passed.pop().close()
        if listening is not None:
            listening.shutdown(socket.SHUT_RDWR)
            listening.close()
        while self._threads:
            self._threads.pop().join(20)

    def wait_for(self, do: str, **words) -> dict:
        """Return a launcher's message with these words, once it has come."""

        def found():
            return next((each for each in self.told if each["do"] == do and words.items() <= each.items()), None)

        with self._changed:
            assert self._changed.wait_for(found, 20), (do, words, self.told)
            return found()

    def ask(self, do: str, *, answered: bool = True, **words) -> dict | None:
        """Asks the launcher; its answer, if there is to be one."""
        with self._changed:
            number = self._last_number = self._last_number + 1
        self._connections[-1].send(json.dumps({**({"d": number} if answered else {}), "do": do, **words}).encode())
        if not answered:
            return None
        with self._changed:
            assert self._changed.wait_for(lambda: number in self._answers, 20), (do, words)
            return self._answers.pop(number)

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            self._connections.append(connection)
            self._spawn(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            while received := _receive(connection):
                raw, fds = received
                message = json.loads(raw)
                with self._changed:
                    if "d" in message:
                        self._answers[message["d"]] = message
                    else:
                        self.told.append(message)
                    self._changed.notify_all()
                if "n" in message:
                    self._answer(connection, message)
                for fd in fds:
                    program = socket.socket(fileno=fd)
                    if self.keep_connections:
                        self.passed.append(program)
                    else:
                        program.close()

    def _answer(self, connection: socket.socket, message: dict) -> None:
        words: dict[str, object] = {"ok": True}
        words |= {"usage": {"tokens": 7}} if message["do"] == "end" else {"mount": self.mount}
        if message["do"] in self.refusals:
            words = {"error": self.refusals[message["do"]], "errno": 11}
        with suppress(OSError):
            connection.send(json.dumps({"n": message["n"], **words}).encode())


def _receive(connection: socket.socket) -> tuple[bytes, list[int]] | None:
    try:
        raw, fds, _, _ = socket.recv_fds(connection, 1 << 16, 4, socket.MSG_CMSG_CLOEXEC)
    except OSError:
        return None
    return (raw, list(array.array("i", fds))) if raw else None
