"""KV_CLAIM and KV_NAME: open a file, or let exactly one program make it. The file appears when it is complete.

If no file has the wanted name, the first program that asks claims the name, and gets an unnamed file. Other programs
wait. The claim belongs to the unnamed file. KV_NAME names the file, and ends the claim. If the file is closed before
that (or its program ends), the next waiting program gets the claim, unless a file has the name by then.

Programs of one user wait without limit. Another user's claim may never end. So a caller waits for another user's claim
only if the caller accepts files of that user, and for at most `PATIENCE_S`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

import trio

from kvfs.fs import Claim, FileSystem, OpenKv
from libsym.abi import ANY_OWNER, OPEN_WRITE, Op
from libsym.channel.server import Request
from libsym.errors import Invalid, WouldBlock
from scheduler.batch.batch_scheduler import BatchScheduler
from scheduler.connection.lip import MAX_WAITS
from scheduler.connection.system_call import SystemCall
from scheduler.operations.closing import Closing
from scheduler.operations.opening import opened
from scheduler.operations.operation import Operation, Outcome, Table
from scheduler.wire.payloads import mode_of, text_of
from scheduler.wire.replies import Reply

PATIENCE_S = 30.0
"""Longest wait for another user's claim. Computing a long context takes about as long. Afterwards both users may
compute the file, which is safe.
"""
_MAX_UID = (1 << 32) - 2


class Claiming:
    """Answers KV_CLAIM and KV_NAME."""

    def __init__(self, fs: FileSystem, batches: BatchScheduler, closing: Closing) -> None:
        self._fs = fs
        self._batches = batches
        self._closing = closing

    def table(self) -> Table:
        return {
            Op.KV_CLAIM: Operation(self._claim, max_waiting=MAX_WAITS, opens=True),
            Op.KV_NAME: Operation(self._name, takes_payload=False),
        }

    def _claim(self, call: SystemCall) -> Outcome:
        """Open the file if it exists. Otherwise a coroutine waits for the claim."""
        lip, request = call.lip, call.request
        path, write = text_of(request), bool(request.flags & OPEN_WRITE)
        mode, owner = mode_of(request), _owner_of(request)

        def look() -> OpenKv | Claim:
            return self._fs.kv_open_or_claim(lip.credentials, path, write=write, owner=owner)

        found = look()
        if not isinstance(found, Claim):
            return opened(self._fs, lip, found)
        return self._wait(call, found, mode, look, PATIENCE_S if owner != 0 else 0.0)

    def _name(self, call: SystemCall) -> None:
        """Give a file its claimed name, when all earlier calls on the file are over."""
        lip, request = call.lip, call.request
        file = lip.file(request.handle)
        lip.end_generations(request.handle)

        def name() -> Reply:
            file = lip.file(request.handle)  # the file may have been closed meanwhile
            self._fs.kv_name(lip.credentials, file, write=bool(request.flags & OPEN_WRITE))
            return lip.place_of(file)

        self._batches.exclusive(file, partial(call.answer_by, name))

    async def _wait(
        self, call: SystemCall, claim: Claim, mode: int, look: Callable[[], OpenKv | Claim], patience_s: float
    ) -> Reply | None:
        lip = call.lip
        while True:
            file = None
            try:
                await self._acquire(claim, patience_s)
                found = look()
                if not isinstance(found, Claim):
                    return opened(self._fs, lip, found)
                if found.key == claim.key:
                    file = self._fs.kv_create_claimed(lip.credentials, claim, mode, lip.model)
                    self._give(call, file)
                    return None
            finally:
                if file is None:
                    self._fs.give_up(claim)
            claim = found  # the path leads to another directory now

    async def _acquire(self, claim: Claim, patience_s: float) -> None:
        """Wait for the user's other claims on the name, then at most `patience_s` for claims of other users.

        After `patience_s`, this claim and the claim of another user exist side by side.
        """
        await self._fs.claims.acquire(claim.key, claim, exclusive=True)
        with suppress(WouldBlock):
            self._fs.claims.acquire_nowait(claim.shared_key, claim, exclusive=True)
            return
        with trio.move_on_after(patience_s):
            await self._fs.claims.acquire(claim.shared_key, claim, exclusive=True)

    def _give(self, call: SystemCall, file: OpenKv) -> None:
        """Give a claim to the call. CANCEL ends the claim even after the answer, because other programs wait for it."""
        reply = call.lip.opened(file)
        handle = reply.args[0]

        def take_back() -> None:
            if file.claim is not None:
                self._closing.close_handle(call.lip, handle)

        call.answer(reply)
        if call.is_cancelled:  # CANCEL arrived while the claim was given
            take_back()
        else:
            call.when_cancelled(take_back)
            call.tie(handle)


def _owner_of(request: Request) -> int | None:
    """Return the user whose files the caller accepts, besides its own and root's. 0: no other user; None: all users."""
    owner = request.args[1]
    if owner == ANY_OWNER:
        return None
    if not 0 <= owner <= _MAX_UID:
        raise Invalid(f"owner {owner} is no uid")
    return owner
