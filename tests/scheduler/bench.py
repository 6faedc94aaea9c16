"""The scheduler without a daemon: over a real file system, and over a real decoder of a tiny model that can be held."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import trio

from decoder.batch import NativeStep
from decoder.cpu.arena import Arena
from decoder.cpu.backend import CpuDecoder
from decoder.image_facts import Facts
from decoder.model import load_model
from kvfs.fs import FileSystem
from kvfs.names.tree import Credentials
from kvfs.pages.accounts import Accounts
from kvfs.pages.pool import PagePool
from libsym.errors import NoBuffers, SymError
from libsym.rows.sampler import RowSampler, Sampler
from scheduler.batch.batch_scheduler import BatchScheduler
from scheduler.batch.call import PredCall
from scheduler.batch.generation import GenerateCall
from scheduler.batch.policy import StepLimits
from scheduler.connection.lip import Lip
from scheduler.doors.gate import Gate
from scheduler.operations.models import Models
from scheduler.programs import program as programs
from scheduler.programs.registry import Programs
from scheduler.programs.used import Used
from scheduler.wire.replies import Reply
from symphony.daemon.model_text import LoadedText

ME = Credentials(0, 0, frozenset())
NUM_PAGES = 64
VOCAB_SIZE = 259
NUM_SLOTS = 64
LIMITS = StepLimits(max_tokens=64)
"""Limits that are small enough to cut prefills."""


class Bench:
    """All parts of a daemon behind the listener, each made on first use."""

    def __init__(self, directory: Path, *, num_pages: int = NUM_PAGES, limits: StepLimits = LIMITS) -> None:
        self.model = load_model("tiny")
        self.arena = Arena(self.model.config, num_pages)
        accounts = Accounts(
            num_pages,
            self.arena.page_bytes,
            weighed=lambda account: self.batches.weigh(account),  # noqa: PLW0108 - made later
        )
        facts = Facts(self.model, self.arena, "float32")
        self.fs = FileSystem(
            PagePool(self.arena, accounts), facts, directory / "files", 0, 0, engine=lambda: self.batches
        )
        self.tree = self.fs.volume.tree
        self._limits = limits

    @cached_property
    def steps(self) -> Steps:
        return Steps(CpuDecoder(self.model.config, self.model.weights, self.arena, 1))

    @cached_property
    def batches(self) -> BatchScheduler:
        config = self.model.config
        steps, native = self.steps, self.steps.native
        return BatchScheduler(self.fs, steps, config.max_positions, config.vocab_size, self._limits, native=native)

    @cached_property
    def text(self) -> Any:
        return LoadedText(self.model, self.arena, "cpu", "/kv")

    @cached_property
    def programs(self) -> Programs:
        return Programs()

    @cached_property
    def gate(self) -> Gate:
        return Gate(self.fs, self.batches, Models({"tiny": self.text}), self.programs, dict)

    def lip(self, uid: int = 0) -> Any:
        """A program whose channel keeps what it is answered."""
        answers: Any = Answers()
        return Lip(os.getpid(), Credentials(uid, 0), answers)

    def file(self) -> Any:
        return self.fs.kv_create(ME, None, 0o600)

    def submit(
        self,
        file: Any,
        tokens: Sequence[int],
        *,
        program: Any = None,
        positions: Sequence[int] | None = None,
        rows: str = "last",
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> Result:
        """Submit a call; the result is filled in when it ends."""
        num_rows = {"none": 0, "last": 1, "all": len(tokens)}[rows]
        buffers: list[Any] = [np.full(self.model.config.vocab_size, np.nan, np.float32) for _ in range(num_rows)]
        result = Result(buffers)
        numbers = np.asarray(tokens, np.int32)
        places = None if positions is None else np.asarray(positions, np.int32)
        views: Any = tuple(memoryview(buffer) for buffer in buffers)
        caller: Any = program or Program()
        call = result.call = PredCall(caller, file, numbers, places, num_rows, result.finish)
        call.rows, call.priority, call.deadline_s = views, priority, deadline_s
        self.batches.submit(result.call)
        return result

    async def held(self, begin: Callable[[], Any]) -> Any:
        """Return what `begin` returns, when the step of what it begins is held."""
        self.steps.hold()
        begun = begin()
        await self.steps.wait_entered()
        return begun

    async def finish(self, *results: Result) -> None:
        """Let steps go on, and wait for these results."""
        self.steps.gate.set()
        for result in results:
            await result.wait()

    def run_test(self, scenario: Callable[[], Awaitable[None]]) -> None:
        """Run `scenario` beside the scheduler, then check the books."""

        async def main() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.batches.run)
                with trio.fail_after(30):
                    await scenario()
                self.fs.check()
                nursery.cancel_scope.cancel()

        trio.run(main)


def new_generation(
    caller: Any, file: Any, tokens: Sequence[int], call: Any, *, max_tokens: int, draft: Any = None, priority: int = 0
) -> GenerateCall:
    """A greedy generation without a grammar, which `call` is told of."""
    return GenerateCall(
        caller,
        file,
        np.array(tokens, np.int32),
        None,
        call,
        max_tokens=max_tokens,
        sampler=RowSampler(Sampler.greedy().block(), VOCAB_SIZE),
        stop_tokens=frozenset(),
        stops=None,
        draft=draft,
        priority=priority,
    )


class Steps:
    """A decoder that can be held at the start of a step, or told to fail one.

    Without a decoder below, its steps compute nothing, and C can call them, too.
    """

    def __init__(self, decoder: CpuDecoder | None = None) -> None:
        self.decoder = decoder
        self.batches: list[list[tuple[int, int]]] = []
        self.failure: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self._function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(self._native_step)

    @property
    def native(self) -> NativeStep | None:
        if self.decoder is not None:
            return None
        return NativeStep(ctypes.cast(self._function, ctypes.c_void_p).value or 0, 0)

    def step(self, batch: Any) -> None:
        self.batches.append([(chunk.start, len(chunk.tokens)) for chunk in batch.chunks])
        self._begin()
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        if self.decoder is not None:
            self.decoder.step(batch)

    def _native_step(self, _decoder: object, _batch: object) -> int:
        self._begin()
        return 0

    def _begin(self) -> None:
        self.entered.release()
        assert self.gate.wait(20)

    def hold(self) -> None:
        """The next step stays at its start; `wait_entered` knows none of those before."""
        self.gate.clear()
        while self.entered.acquire(blocking=False):
            pass

    def hold_next(self) -> None:
        """The step that is held goes on, and the next one stays at its start."""
        held, self.gate = self.gate, threading.Event()
        held.set()

    async def wait_entered(self) -> None:
        """Wait until a step has begun."""
        with trio.fail_after(20):
            await trio.to_thread.run_sync(self.entered.acquire)


@dataclass(eq=False)
class Program:
    """Caller: a connection, and the program that it is of."""

    pid: int = 1
    uid: int = 0
    stream: int = 1
    program: programs.Program = field(init=False)

    def __post_init__(self) -> None:
        self.program = programs.Program.of_nobody(self.pid, self.uid)

    @property
    def used(self) -> Used:
        return self.program.used

    def free_rows(self, first: int, num_rows: int) -> None:
        """Rows are the test's."""


class Result:
    """Result of a call, once it has ended."""

    def __init__(self, rows: list[np.ndarray]) -> None:
        self.rows = rows
        self.call: PredCall | None = None
        self.error: SymError | None = None
        self._over = trio.Event()

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def finish(self, outcome: Reply | SymError) -> None:
        assert not self._over.is_set(), "answered twice"
        self.error = outcome if isinstance(outcome, SymError) else None
        self._over.set()

    async def wait(self) -> list[np.ndarray]:
        await self._over.wait()
        if self.error is not None:
            raise self.error
        return self.rows


@dataclass
class Answers:
    """Takes the place of a channel: what was replied, by request, and slots that can't be given out twice."""

    replies: dict[int, list] = field(default_factory=dict)
    over: dict[int, None] = field(default_factory=dict)
    """Requests that have ended, in this order."""
    free: set[int] = field(default_factory=lambda: set(range(NUM_SLOTS)))
    when_room: dict[object, Callable[[], None]] = field(default_factory=dict)
    num_waiting_replies = 0
    num_slots = NUM_SLOTS
    doorbell = 0
    num_lent_slots = 0
    num_given_slots = 0
    num_bytes = (0, 0)
    memory = (0, None)

    @property
    def errors(self) -> dict[int, int]:
        """errno by request that is over, 0 for none."""
        last = {number: self.replies[number][-1][2] for number in self.over}
        return {number: 0 if error is None else error.errno for number, error in last.items()}

    @property
    def args(self) -> dict[int, tuple[int, ...]]:
        return {number: replies[-1][0] for number, replies in self.replies.items()}

    def asked(self) -> None:
        """Every request is with the gate."""

    def serve_by(self, function, connection, operations) -> None:
        """Serve no calls in C: there is no ring, so all of them come by the gate."""

    def reply(self, request_id, args=(), payload=b"", error=None, *, more=False, num_rows=0) -> None:
        assert request_id not in self.over, "answered after its end"
        self.num_lent_slots -= num_rows
        if not more:
            self.over[request_id] = None
        self.replies.setdefault(request_id, []).append((args, payload, error))

    def take_rows(self, num_rows: int) -> int:
        for first in range(NUM_SLOTS - num_rows + 1):
            wanted = set(range(first, first + num_rows))
            if wanted <= self.free:
                self.free -= wanted
                self.num_lent_slots += num_rows
                self.num_given_slots += num_rows
                return first
        raise NoBuffers("none are free")

    def row(self, _slot: int) -> memoryview:
        row: Any = np.empty(VOCAB_SIZE, np.float32)
        return memoryview(row)

    def free_rows(self, first: int, num_rows: int) -> None:
        rows = set(range(first, first + num_rows))
        assert not rows & self.free, "freed twice"
        self.free |= rows
        self.num_lent_slots -= num_rows

    @property
    def num_held_slots(self) -> int:
        return NUM_SLOTS - len(self.free)

    def want_slots(self) -> None:
        pass

    def close(self) -> None:
        pass
