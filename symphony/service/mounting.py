"""Client of the mount helper, for the daemon. The mount lasts as long as the connection.

If the helper ends, the mount stays, and the daemon asks the next helper to keep it. So the helper can be upgraded or
killed while the mount is in use.
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
"""Time limit of an answer. The service manager may have to start the helper first."""
UNMOUNT_TIMEOUT_S = 10.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 30.0
"""First and longest pause between attempts to reach another helper."""
_MAX_ANSWER_BYTES = 8192


class HelpersMount:
    """A mount that the mount helper makes and keeps. Implements `kvfs.mount.session.Mounter`."""

    def __init__(self, path: Path) -> None:
        """`path`: the helper's socket."""
        self._path = path
        self._where: Path | None = None
        self._connection: socket.socket | None = None

    @property
    def is_kept(self) -> bool:
        """Whether a helper will unmount the mount if the daemon is killed."""
        return self._connection is not None

    # ---- the protocol Mounter

    def mount(self, where: Path, source: str) -> int:
        """Have the helper mount, and return the descriptor of /dev/fuse. The call blocks.
        SymError: the helper refuses, or is missing.
        """
        connection, _, descriptors = self._ask("mount", where, source)
        if len(descriptors) != 1:
            connection.close()
            raise ProtocolError(f"the mount helper at {self._path} sent {len(descriptors)} descriptors instead of 1")
        self._connection, self._where = connection, where
        return descriptors[0]

    def agreed(self) -> None:
        """Tell the helper that the kernel and the daemon have agreed on features (FUSE_INIT).
        The helper changes the mount's read-ahead only now: the agreement would have reset it.
        """
        if self._connection is not None:
            with suppress(OSError):  # `keep_for_ever` handles a helper that is gone
                self._connection.send(json.dumps({"do": "agreed"}).encode())

    def unmount(self) -> None:
        """Have the helper unmount, and wait until it has done so. A failure is logged. Runs on the trio thread.

        The helper closes the connection when it has unmounted.
        """
        connection, where, self._connection, self._where = self._connection, self._where, None, None
        if connection is None:
            if where is not None:
                log.warning(
                    "%s stays mounted, as no mount helper is connected: the next mount there replaces it", where
                )
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

    # ---- connection to a helper while the daemon runs

    async def keep_for_ever(self) -> None:
        """Stay connected to a helper, so that it unmounts if the daemon dies.
        If the helper ends, connect to the next helper.
        """
        while True:
            if self._connection is not None:
                with suppress(trio.ClosedResourceError):  # `unmount` closed it
                    await trio.lowlevel.wait_readable(self._connection)
            if self._where is None:
                await trio.sleep_forever()  # there is no mount any more
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
                # The end of the daemon abandons this call, since files are written back only after the unmount.
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
        """Parse and return the helper's answer. SymError: the helper refuses, or the answer is invalid."""
        if not data:
            raise NotConnected(f"the mount helper at {self._path} hung up: see its log (journalctl -u symphony-mount)")
        try:
            answer: dict[str, Any] = json.loads(data)
            error = answer.get("error")
        except (ValueError, AttributeError):
            raise ProtocolError(f"the process that listens at {self._path} is no mount helper") from None
        if error is not None:
            raise error_for(int(answer.get("errno", 0)), f"the mount helper says: {error}")
        return answer
