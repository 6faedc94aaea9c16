"""Requests of a program about itself: CANCEL ends one of its calls, and CONFINE confines a connection to one domain."""

from __future__ import annotations

from kvfs.fs import FileSystem
from libsym.abi import Op
from libsym.errors import Invalid, NotPermitted
from scheduler.batch.batch_scheduler import BatchScheduler
from scheduler.connection.system_call import SystemCall
from scheduler.operations.messages import Mail
from scheduler.operations.operation import Operation, Table
from scheduler.wire.payloads import text_of
from scheduler.wire.replies import Reply


class SelfRequests:
    """Answers CANCEL and CONFINE."""

    def __init__(self, fs: FileSystem, batches: BatchScheduler, mail: Mail) -> None:
        self._fs = fs
        self._batches = batches
        self._mail = mail

    def table(self) -> Table:
        return {
            Op.CANCEL: Operation(self._cancel, takes_payload=False),
            Op.CONFINE: Operation(self._confine),
        }

    def _cancel(self, call: SystemCall) -> Reply:
        """End the call with the id args[0], if it is still in flight and can be cancelled."""
        call_id = call.request.args[0]
        ended = call.lip.calls.get(call_id)
        if ended is not None:
            ended.cancel()
        else:
            self._batches.cancel_taken(call.lip.channel, call_id)
        return Reply()

    def _confine(self, call: SystemCall) -> Reply:
        lip = call.lip
        if lip.credentials.root is not None:
            raise NotPermitted("this connection is confined to a domain already: connect again for another")
        if lip.handles or lip.num_later:
            raise Invalid("only a connection without open files can be confined to a domain: connect again")
        lip.credentials = self._fs.confine(lip.credentials, text_of(call.request))
        account = self._fs.account_of(lip.credentials)
        lip.handles.make_for(lip.credentials, account)
        self._batches.pay(lip, account)
        self._mail.leave(lip)
        self._mail.join(lip)
        return Reply()
