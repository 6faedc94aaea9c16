"""The gate takes system calls from the rings, and begins the operation of each.

A request is copied out of shared memory before the daemon looks at it. The operation checks every field once. After
that, the field is a plain value.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import trio

from kvfs.fs import FileSystem
from kvfs.names.agreement import Unsettled, when_settled
from kvfs.pages.accounts import StillCharged
from kvfs.pages.holdings import Kind
from kvfs.volume.patience import when_forgotten
from libsym.abi import Op
from libsym.channel.server import Request
from libsym.errors import Invalid, SymError
from scheduler.batch.batch_scheduler import BatchScheduler
from scheduler.batch.stays import Connected
from scheduler.connection.lip import MAX_LATER, Lip
from scheduler.connection.system_call import SystemCall
from scheduler.connection.under_way import FREE_BYTES, UnderWay, UserBytes
from scheduler.operations.fetching import NO_PEERS, Others
from scheduler.operations.models import Models
from scheduler.operations.operation import Operation, Outcome
from scheduler.operations.pressure import Pressing
from scheduler.operations.registry import all_operations
from scheduler.programs.registry import Programs
from scheduler.wire.replies import Reply

_LET_GO = frozenset({Op.CANCEL, Op.KV_CLOSE, Op.KV_UNLOCK, Op.UNSUBSCRIBE, Op.GETRUSAGE, Op.PING})
"""Operations that a program may still call after it has reached a limit."""
_MAKING = frozenset({Op.KV_CREATE, Op.KV_FORK, Op.KV_MKDIR})
"""Operations that make a name immediately. If they fail with StillCharged, they have changed nothing, and can be
retried.
"""
FILES_A_TURN = 32
"""Number of files of an ended program that are closed, in 1 ms, before other tasks may run."""


class Gate:
    """Answers the system calls of every LIP."""

    def __init__(
        self,
        fs: FileSystem,
        batches: BatchScheduler,
        models: Models,
        programs: Programs,
        daemon_info: Callable[[], dict[str, Any]],
        peers: Others = NO_PEERS,
    ) -> None:
        self._accounts = fs.pool.accounts
        self._batches = batches
        self._programs = programs
        self._operations = all_operations(fs, batches, models, programs, daemon_info, peers)
        self.models = models
        """The models that the daemon serves."""
        self._num_calls: Counter[Op] = Counter()
        self._pool, self._see = fs.pool, fs.volume.see
        self._core = batches.gate
        self._account_of = fs.account_of
        self._users: WeakValueDictionary[int, UserBytes] = WeakValueDictionary()
        """Payload bytes in flight of each user's connections, by uid."""

    @property
    def num_calls(self) -> Counter[Op]:
        """Return the number of system calls taken, by operation."""
        return self._num_calls + Counter({op: int(self._core.num_calls[op]) for op in Op})

    @property
    def pressing(self) -> Pressing:
        """Return the operation that warns programs before memory runs short."""
        return self._operations.pressing

    def receive(self, lip: Lip, most: int) -> list[Request]:
        """Return a program's new requests for `handle`. Requests that the core has carried out itself are left out."""
        requests = lip.channel.receive(most)
        self._pool.take_news()
        return requests

    def handle(self, lip: Lip, request: Request, nursery: trio.Nursery) -> None:
        """Take one system call: answer it now, or begin work that will answer it."""
        operation = self._operations.by_op[request.op]
        self._catch_up(lip, request, operation)
        self._num_calls[request.op] += 1
        lip.stream = request.stream
        call = SystemCall(lip, request)
        try:
            outcome = self._begin(call, operation)
        except Exception as failure:  # noqa: BLE001 - reported by `fail`, which knows every kind
            call.fail(failure)
            return
        if isinstance(outcome, Reply):
            call.answer(outcome)
        elif outcome is not None:
            scope = trio.CancelScope()
            call.wait(scope.cancel)  # now, because CANCEL may be in the same batch
            nursery.start_soon(_go_on, call, outcome, scope)

    def _catch_up(self, lip: Lip, request: Request, operation: Operation) -> None:
        """Commit what the run has computed for the files that the call reads.

        If the call may read all files, the commit takes 10 us for each file in the run.
        """
        if operation.commits_itself:
            return
        is_of_its_file = operation.is_of_its_file and not lip.program.limits.is_any
        file = lip.handles.get(request.handle) if is_of_its_file else None
        if file is None:
            self._batches.sync()
        else:
            self._batches.sync_file(file.table)

    def _begin(self, call: SystemCall, operation: Operation) -> Outcome:
        """Check the request against limits and the operation's rules, and begin the operation."""
        request = call.request
        if call.lip.program.over is not None and request.op not in _LET_GO:
            raise call.lip.program.over_limit()
        num_bytes = len(request.payload)
        if num_bytes and not operation.takes_payload:
            raise Invalid(f"{request.op.name} takes no payload, and {num_bytes} bytes came with it")
        if num_bytes > FREE_BYTES or request.op is Op.PRED_BATCH:
            call.count_bytes()
        if operation.max_waiting is not None:
            call.check_may_wait(operation.max_waiting)
        if operation.opens:
            call.lip.holdings.require(Kind.HANDLE)
        try:
            return operation.begin(call)
        except (StillCharged, Unsettled) as error:
            if request.op not in _MAKING and not isinstance(error, Unsettled):
                raise
            call.check_may_wait(MAX_LATER)
            return when_settled(partial(when_forgotten, partial(_attempt, operation, call)))

    def welcome(self, lip: Lip) -> None:
        """Register a new connection: count its calls for its program, and let it receive messages."""
        lip.program = self._programs.join(lip, lip.launched)
        lip.charge_to(self._accounts.of(lip.uid).holdings)
        lip.under_way = UnderWay(self._users.setdefault(lip.uid, UserBytes()), lip.holdings)
        lip.handles.is_of(lip.program.id)
        self._operations.mail.join(lip)
        if not lip.program.limits.is_any:  # with limits, each call needs a check here
            account = self._account_of(lip.credentials)
            lip.handles.make_for(lip.credentials, account)
            self._batches.connect(Connected(lip, lip.handles.core, partial(SystemCall, lip), account))
            lip.handles.serve(lip.channel, self._see, lip.holdings, lip.program.page_seconds)

    async def see_off(self, lip: Lip) -> None:
        """Clean up after a connection that has ended: forget its calls, and close its files, a few at a time.

        A file is closed once no step uses it.
        """
        self._disconnect(lip)
        with trio.CancelScope(shield=True):
            while len(lip.handles) > FILES_A_TURN:
                self._operations.closing.close_some(lip, FILES_A_TURN)
                await trio.lowlevel.checkpoint()
        self._operations.closing.close_some(lip, len(lip.handles))
        lip.handles.close()
        lip.holdings.let_go(Kind.CONNECTION)

    async def close(self) -> None:
        """Wait for work that continues after every program has ended."""
        await self._operations.generating.compiled()

    def _disconnect(self, lip: Lip) -> None:
        lip.handles.ignore()
        trio.lowlevel.notify_closing(lip.channel.doorbell)  # the next connection may get the same descriptor
        self._operations.mail.leave(lip)
        self._operations.pressing.leave(lip)
        lip.slots.drop()
        lip.under_way.close()
        self._batches.drop(lip)
        lip.forget_calls()
        self._programs.leave(lip, lip.program)
        lip.channel.close()


async def _attempt(operation: Operation, call: SystemCall) -> Reply | None:
    outcome = operation.begin(call)
    return outcome if isinstance(outcome, Reply | None) else await outcome


async def _go_on(call: SystemCall, rest: Coroutine[Any, Any, Reply | None], scope: trio.CancelScope) -> None:
    """Run the coroutine that finishes an operation. The end of the program ends the coroutine."""
    reply: Reply | SymError | None = SymError(f"{call.request.op.name.lower()}() was cancelled", errno.ECANCELED)
    try:
        with scope:
            reply = await rest
    except Exception as failure:  # noqa: BLE001 - reported by `fail`, which knows every kind
        call.fail(failure)
    except BaseException:
        call.drop()
        raise
    else:
        if reply is not None:
            call.answer(reply)
