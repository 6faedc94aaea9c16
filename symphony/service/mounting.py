"""The daemon's side of the mount helper: it asks for a mount, and has it for as long as the connection lasts.

A helper that ends takes no mount with it: the daemon asks the next one to keep it. So the helper can be upgraded, or be
killed, while the mount is in use.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import trio

from libsym.errors import NotConnected, ProtocolError, SymError, error_for

log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 30.0
"""The helper may have to be started first."""
UNMOUNT_TIMEOUT_S = 10.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 30.0
"""Between tries to find another helper."""
_MAX_ANSWER_BYTES = 8192


class HelpersMount:
    """One mount; satisfies `kvfs.mount.session.Mounter`."""

    def __init__(self, path: Path) -> None:
        """`path`: the helper's socket."""
        self._path = path
        self._where: Path | None = None
        self._connection: socket.socket | None = None

    @property
    def is_kept(self) -> bool:
        """Whether a helper will unmount it should the daemon be killed."""
        return self._connection is not None

    # ---- what the mount's session asks for

    def mount(self, where: Path, source: str) -> int:
        """Blocks; the descriptor of /dev/fuse. SymError: the helper refuses, or there is none."""
        connection, _, descriptors = self._ask("mount", where, source)
        if len(descriptors) != 1:
            connection.close()
            raise ProtocolError(f"the mount helper at {self._path} sent {len(descriptors)} descriptors instead of 1")
        self._connection, self._where = connection, where
        return descriptors[0]

    def agreed(self) -> None:
        """The kernel has asked what the daemon can do, and will not change what it thinks of the mount any more."""
        if self._connection is not None:
            with suppress(OSError):  # `keep_for_ever` sees to a helper that is gone
                self._connection.send(json.dumps({"do": "agreed"}).encode())

    def unmount(self) -> None:
        """On the trio thread. Returns when it is: the helper hangs up then. Else it says so in the log."""
        connection, where, self._connection, self._where = self._connection, self._where, None, None
        if connection is None:
            if where is not None:
                log.warning("%s stays mounted, for there is no mount helper: the next one takes it away", where)
            return
        trio.lowlevel.notify_closing(connection)
        with connection:
            connection.settimeout(UNMOUNT_TIMEOUT_S)
            try:
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(_MAX_ANSWER_BYTES):
                    pass
            except OSError as error:
                log.warning("%s: the mount helper does not say that it is unmounted: %s", where, error)

    # ---- what the daemon does meanwhile

    async def keep_for_ever(self) -> None:
        """See to it that there is always a helper to unmount what this daemon should leave."""
        while True:
            if self._connection is not None:
                with suppress(trio.ClosedResourceError):  # by `unmount`
                    await trio.lowlevel.wait_readable(self._connection)
            if self._where is None:
                await trio.sleep_forever()  # it is unmounted
            assert self._where is not None
            if self._connection is not None:
                self._connection.close()
                self._connection = None
                log.warning("the mount helper is gone: looking for the next one")
            self._connection = await self._next_helper(self._where)
            log.info("the mount helper at %s keeps %s", self._path, self._where)

    async def _next_helper(self, where: Path) -> socket.socket:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                # Given up at the end of the daemon: what is not on disk is written only behind that.
                connection, _, _ = await trio.to_thread.run_sync(self._ask, "keep", where, abandon_on_cancel=True)
            except SymError as error:
                log.warning("%s: trying again in %g s", error, pause_s)
                await trio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            else:
                return connection

    def _ask(self, do: str, where: Path, source: str = "") -> tuple[socket.socket, dict[str, Any], list[int]]:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.settimeout(ANSWER_TIMEOUT_S)
            connection.connect(os.fspath(self._path))
            request = {"do": do, "at": os.fspath(where)} | ({"source": source} if source else {})
            connection.send(json.dumps(request).encode())
            data, descriptors, _, _ = socket.recv_fds(connection, _MAX_ANSWER_BYTES, 4, socket.MSG_CMSG_CLOEXEC)
            answer = self._checked(data)
        except OSError as error:
            connection.close()
            if isinstance(error, SymError):
                raise
            why = error.strerror or str(error)
            raise NotConnected(
                f"no mount helper at {self._path}: {why}; start symphony-mount.socket, or leave mount_helper out"
            ) from None
        return connection, answer, descriptors

    def _checked(self, data: bytes) -> dict[str, Any]:
        """SymError: it says no, or nothing that can be understood."""
        if not data:
            raise NotConnected(f"the mount helper at {self._path} hung up: see its log (journalctl -u symphony-mount)")
        try:
            answer: dict[str, Any] = json.loads(data)
            error = answer.get("error")
        except (ValueError, AttributeError):
            raise ProtocolError(f"whoever listens at {self._path} is no mount helper") from None
        if error is not None:
            raise error_for(int(answer.get("errno", 0)), f"the mount helper says: {error}")
        return answer
