"""TRACE: send records of the scheduler's acts as they happen, until a timeout or CANCEL.

The first reply describes the daemon, in JSON. Further replies are blocks of records (`scheduler/trace/records.py`). A
caller that does not read loses records when the queue of its recording is full.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Coroutine
from typing import Any

import trio

from decoder.cores import processor
from kvfs.fs import FileSystem
from libsym.abi import NO_TIMEOUT, Op
from libsym.channel.server import PAYLOAD_BYTES
from libsym.errors import Busy, Invalid
from scheduler.batch.batch_scheduler import BatchScheduler
from scheduler.connection.lip import MAX_LATER
from scheduler.connection.system_call import SystemCall
from scheduler.operations.operation import Operation, Table, require_operator
from scheduler.operations.text import TextModel
from scheduler.trace.recorder import Recorder, Recording
from scheduler.wire.replies import Reply

MAX_RECORDINGS = 4
"""Maximum number of recordings of all programs together. Each may have a full queue."""
DRAIN_S = 0.05
"""Period in which records are sent."""


class Tracing:
    """Answers TRACE."""

    def __init__(self, fs: FileSystem, batches: BatchScheduler, model: TextModel) -> None:
        self._fs = fs
        self._batches = batches
        self._model = model

    def table(self) -> Table:
        return {Op.TRACE: Operation(self._trace, takes_payload=False, max_waiting=MAX_LATER)}

    def _trace(self, call: SystemCall) -> Coroutine[Any, Any, Reply]:
        """Begin a trace. The first arg is its length in milliseconds (-1: until CANCEL), the second the version of the
        records (0 means 1).
        """
        require_operator(call, "record what it does")
        timeout_ms = call.request.args[0]
        if timeout_ms < NO_TIMEOUT:
            raise Invalid(f"a trace of {timeout_ms} ms: give 0 or more, or -1 for one that lasts until it is cancelled")
        version = call.request.args[1] or 1
        if version < 0:
            raise Invalid(f"there is no version {version} of traces")
        return self._run(call, timeout_ms, version)

    @property
    def _recorder(self) -> Recorder:
        return self._batches.recorder

    async def _run(self, call: SystemCall, timeout_ms: int, version: int) -> Reply:
        if self._recorder.num_recordings >= MAX_RECORDINGS:
            raise Busy(f"{MAX_RECORDINGS} traces are being recorded already: wait until one is over")
        recording = self._batches.begin_trace(version)
        try:
            call.send((), json.dumps(self._header()).encode())
            with trio.move_on_after(float("inf") if timeout_ms == NO_TIMEOUT else timeout_ms / 1000):
                while True:
                    await trio.sleep(DRAIN_S)
                    self._batches.trace_steps()
                    self._recorder.flush()
                    while not call.lip.channel.num_waiting_replies and _send_next(call, recording):
                        pass
        finally:
            self._batches.end_trace(recording)
            while _send_next(call, recording):  # however the trace ends, it includes all acts until now
                pass
        return Reply()

    def _header(self) -> dict[str, Any]:
        return {
            "model": self._fs.volume.model.name,
            "backend": self._model.info()["backend"],
            "precision": self._fs.volume.model.identity["precision"],
            "processor": processor(),
            "page_bytes": self._fs.pool.page_bytes,
            "pid": os.getpid(),
            "clock": {"monotonic_ns": time.monotonic_ns(), "realtime_ns": time.time_ns()},
        }


def _send_next(call: SystemCall, recording: Recording) -> bool:
    """Send the oldest block. Return False if there is none."""
    block = recording.take()
    if block is None:
        return False
    for part in block.within(PAYLOAD_BYTES):
        call.send((int(part.kind), len(part.records), len(part.details)), part.tobytes())
    return True
