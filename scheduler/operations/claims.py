"""KV_CLAIM and KV_NAME: a file is opened, or made by exactly one of those who want it, and appears when it is whole.

Who finds no file of a name claims the name and gets an anonymous file. The others wait. The claim belongs to that
file: KV_NAME gives it its name and the claim back, closing it before that (or the end of the program) gives the claim
to the next, who looks again whether there is a file.

Programs of one user wait without limit. A claim of another user, which may never end, is waited for by those callers
alone that would take the other's file, and for `PATIENCE_S` at most.
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
from scheduler.payloads import mode_of, text_of
from scheduler.replies import Reply

PATIENCE_S = 30.0
"""For another user's claim: computing a long context takes about so long, and a text twice is no harm."""
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
        """Open the file if it is there; else a coroutine waits for the claim."""
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
        """Give a file the name that it has claimed, when the calls before this are over."""
        lip, request = call.lip, call.request
        file = lip.file(request.handle)
        lip.end_generations(request.handle)

        def name() -> Reply:
            file = lip.file(request.handle)  # it may have been closed meanwhile
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
                    file = self._fs.kv_create_claimed(lip.credentials, claim, mode)
                    self._give(call, file)
                    return None
            finally:
                if file is None:
                    self._fs.give_up(claim)
            claim = found  # the path leads to another directory now

    async def _acquire(self, claim: Claim, patience_s: float) -> None:
        """Wait for the user's other claims on the name, and with patience for other users'; those may go on."""
        await self._fs.claims.acquire(claim.key, claim, exclusive=True)
        with suppress(WouldBlock):
            self._fs.claims.acquire_nowait(claim.shared_key, claim, exclusive=True)
            return
        with trio.move_on_after(patience_s):
            await self._fs.claims.acquire(claim.shared_key, claim, exclusive=True)

    def _give(self, call: SystemCall, file: OpenKv) -> None:
        """A claim whose answer nobody looks at keeps others waiting: CANCEL ends it, before its answer or behind it."""
        reply = call.lip.opened(file)
        handle = reply.args[0]

        def take_back() -> None:
            if file.claim is not None:
                self._closing.close_handle(call.lip, handle)

        call.answer(reply)
        if call.is_cancelled:  # as the claim was given: too late to keep it from that
            take_back()
        else:
            call.when_cancelled(take_back)
            call.tie(handle)


def _owner_of(request: Request) -> int | None:
    """Return the user whose file the caller takes beside its own and root's: 0 is no other, None all of them."""
    owner = request.args[1]
    if owner == ANY_OWNER:
        return None
    if not 0 <= owner <= _MAX_UID:
        raise Invalid(f"owner {owner} is no uid")
    return owner
