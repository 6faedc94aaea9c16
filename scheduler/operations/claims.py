"""KV_CLAIM and KV_NAME: a file is opened, or made by exactly one of those who want it, and appears when it is whole.

Who finds no file of a name claims the name and gets an anonymous file. The others wait. The claim belongs to that
file: KV_NAME gives it its name and the claim back, closing it before that (or the end of the program) gives the claim
to the next, who looks again whether there is a file.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from kvfs.fs import Claim, FileSystem, OpenKv
from libsym.abi import OPEN_WRITE
from libsym.channel.server import Request
from scheduler.connection.lip import Lip
from scheduler.payloads import mode_of, text_of
from scheduler.replies import Reply


class Claiming:
    """Answers KV_CLAIM and KV_NAME."""

    def __init__(self, fs: FileSystem) -> None:
        self._fs = fs

    def claim(self, lip: Lip, request: Request) -> Reply | Coroutine[Any, Any, Reply]:
        """Open the file if it is there; else a coroutine waits for the claim."""
        mode = mode_of(request)

        def look() -> OpenKv | Claim:
            return self._fs.kv_open_or_claim(lip.credentials, text_of(request), write=bool(request.flags & OPEN_WRITE))

        found = look()
        return self._claim(lip, found, mode, look) if isinstance(found, Claim) else lip.opened(found)

    def name(self, lip: Lip, request: Request) -> Reply:
        """Give a file the name that it has claimed."""
        file = lip.file(request.handle)
        self._fs.kv_name(lip.credentials, file, write=bool(request.flags & OPEN_WRITE))
        return lip.place_of(file)

    async def _claim(self, lip: Lip, claim: Claim, mode: int, look: Callable[[], OpenKv | Claim]) -> Reply:
        while True:
            await self._fs.claims.acquire(claim.key, claim, exclusive=True)
            file = None
            try:
                found = look()
                if not isinstance(found, Claim):
                    return lip.opened(found)
                if found.key == claim.key:
                    file = self._fs.kv_create_claimed(lip.credentials, claim, mode)
                    return lip.opened(file)
            finally:
                if file is None:
                    self._fs.claims.release(claim.key, claim)
            claim = found  # the path leads to another directory now
