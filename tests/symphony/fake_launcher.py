"""A launcher as the daemon sees one: it names programs and passes their connections on, and does what a test says."""

import contextlib
import json
import os
import queue
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_BYTES = 64 << 10
WITHIN_S = 30


class Refused(Exception):
    """Refusal of a request by the daemon."""

    def __init__(self, answer: dict[str, Any]) -> None:
        super().__init__(answer["error"])
        self.errno = answer["errno"]


class FakeLauncher:
    """A connection to the programs socket, read by a thread, and sockets of programs, each with a connection of its
    own.
    """

    def __init__(self, daemon_socket: Path, directory: Path) -> None:
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.connection.connect(f"{daemon_socket}.programs")
        self.asked: queue.Queue[dict[str, Any]] = queue.Queue()
        """Messages of the daemon that `answer_by` does not take."""
        self.answer_by: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {}
        self._directory = directory
        self._answers: dict[int, queue.Queue[dict[str, Any]]] = {}
        self._number = 0
        self._lock = threading.Lock()
        self._listening: list[socket.socket] = []
        threading.Thread(target=self._read, daemon=True).start()

    def request(self, do: str, *, fd: int | None = None, **fields: Any) -> dict[str, Any]:
        """The daemon's answer. Refused: it is an error."""
        with self._lock:
            self._number += 1
            number = self._number
            answers = self._answers[number] = queue.Queue()
        data = json.dumps({"n": number, "do": do, **fields}).encode()
        socket.send_fds(self.connection, [data], [] if fd is None else [fd])
        answer = answers.get(timeout=WITHIN_S)
        if "error" in answer:
            raise Refused(answer)
        return answer

    def start(self, name: str = "prog", **fields: Any) -> str:
        """A program, which may connect from now on."""
        number = fields.pop("id", None) or os.urandom(4).hex()
        self.request("start", id=number, name=name, **{"pid": None, "parent": None, "limits": {}, **fields})
        return number

    def end(self, number: str, status: int = 0, reason: str = "exit") -> dict[str, Any]:
        """Report the end of a program; return the program's usage."""
        return self.request("end", id=number, status=status, reason=reason)["usage"]

    def socket_of(self, number: str) -> str:
        """Return the socket to which a program connects; each connection is passed on."""
        path = self._directory / f"{number}.sock"
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(path))
        listening.listen()
        self._listening.append(listening)
        threading.Thread(target=self._accept, args=(listening, number), daemon=True).start()
        return str(path)

    def answer(self, asked: dict[str, Any], **fields: Any) -> None:
        self.connection.send(json.dumps({"d": asked["d"], **fields}).encode())

    def close(self) -> None:
        """Close all sockets, as if the launcher was killed."""
        for each in (self.connection, *self._listening):
            with contextlib.suppress(OSError):  # it was shut down before
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self, listening: socket.socket, number: str) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return  # it was closed
            with connection:
                self.request("connect", id=number, fd=connection.fileno())

    def _read(self) -> None:
        while True:
            try:
                data = self.connection.recv(MAX_BYTES)
            except OSError:
                return
            if not data:
                return
            found = json.loads(data)
            if "n" in found:
                self._answers.pop(found["n"]).put(found)
            elif found["do"] in self.answer_by:
                self.answer(found, **self.answer_by[found["do"]](found))
            else:
                self.asked.put(found)
