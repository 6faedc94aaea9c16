"""Calls of any kind move as their table says, through all cancellations, delays and failures."""

import time
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvfs.names.tree import Credentials
from libsym.abi import Op
from libsym.channel.server import Request
from libsym.errors import NoBuffers
from scheduler.batch.call import FileCall, PredCall
from scheduler.batch.generation import Draft
from scheduler.batch.states import CallState, Early
from tests.scheduler.bench import VOCAB_SIZE, Program, new_generation
from tests.scheduler.kept_bench import KeptBench
from tests.scheduler.standing_bench import Standing

NUM_FRAMES, NUM_FILES = 8, 4
ACTS = (
    "pred", "long pred", "pred that is late soon", "pred without slots", "slots", "no slots", "decode", "go on",
    "generation", "drafted generation", "cancel", "drop", "fail", "hold", "let go", "to disk", "truncate",
    "another file", "wait",
)  # fmt: skip


class Everything(Standing, KeptBench):
    """Little memory, a little more disk, and the acts of programs in any order."""

    def __init__(self, directory, num_on_disk):
        super().__init__(directory, num_pages=NUM_FRAMES, num_on_disk=num_on_disk)
        self.files = [self.file_of(uid) for uid in range(NUM_FILES)]
        self.programs_here = [Program(number) for number in range(1, 4)]
        self.everybody: list[Any] = [self.program, *self.programs_here]
        self.handles: list[int] = []
        self.calls: list[FileCall] = []
        self.told: list[FileCall] = []
        """Calls that note their end."""
        self.ended: list[FileCall] = []
        self.numbers = count(1)

    def file_of(self, uid):
        return self.fs.kv_create(Credentials(uid, uid, frozenset()), None, 0o600)

    async def act(self, what, which):
        """Act. `which` chooses a file, a program, a call, a length."""
        file, program = self.files[which % NUM_FILES], self.programs_here[which % 3]
        waiting = [call for call in self.calls if call.state is CallState.WAITS_FOR_SLOTS]
        match what:
            case "pred" | "long pred" | "pred that is late soon":
                num_tokens = 1 + which % (7 if what == "pred" else 150)
                deadline_s = time.monotonic() + which % 4 * 1e-3 if "late" in what else None
                self.submit_call(self.pred(program, file, num_tokens, deadline_s=deadline_s))
            case "pred without slots":
                call = self.pred(program, file, 2)
                call.wait_for_slots()
                self.submit_call(call)
            case "slots" if waiting:
                self.batches.have_rows(waiting[which % len(waiting)])
            case "no slots" if waiting:
                self.batches.refuse(waiting[which % len(waiting)], NoBuffers("none"))
            case "decode":
                self.handles.append(self.decode(file, next(self.numbers)))
            case "go on" if self.handles:
                self.ring(self.handles[which % len(self.handles)], next(self.numbers), which % 200)
            case "generation":
                self.calls.append(self.generate(file, [which % 200], next(self.numbers), max_tokens=1 + which % 90))
            case "drafted generation":
                self.submit_call(self.drafted(program, file, which))
            case "cancel" if self.calls:
                self.batches.cancel(self.calls[which % len(self.calls)])
            case "drop":
                self.batches.drop(program)
                self.programs_here[which % 3] = Program(program.pid)
                self.everybody.append(self.programs_here[which % 3])
            case "fail":
                self.steps.failure = RuntimeError("planted")
            case "hold":
                self.steps.hold()
            case "let go":
                self.steps.gate.set()
            case "to disk":
                self.pager.demote(file.table)
            case "truncate":
                self.batches.exclusive(file, lambda: self.fs.kv_truncate(file, file.table.length // 2))
            case "another file":
                self.batches.when_unused(file, partial(self.fs.kv_close, file))
                self.files[which % NUM_FILES] = self.file_of(which % 5)
            case "wait":
                await trio.sleep(which % 5 * 1e-3)

    def submit_call(self, call):
        self.calls.append(call)
        self.told.append(call)
        self.batches.submit(call)

    def pred(self, program, file, num_tokens, *, deadline_s=None):
        tokens = np.arange(num_tokens, dtype=np.int32) % 200
        row: Any = np.empty(VOCAB_SIZE, np.float32)
        found = list[PredCall]()
        call = PredCall(program, file, tokens, None, 1, lambda _outcome: self.ended.append(found[0]))
        call.rows, call.deadline_s = (memoryview(row),), deadline_s
        found.append(call)
        return call

    def drafted(self, program, file, which):
        found = list[FileCall]()
        asked = Asked(next(self.numbers), lambda: self.ended.append(found[0]))
        draft = Draft(4, 1, np.tile(np.arange(50, dtype=np.int32), 2))
        call = new_generation(self.program, file, [which % 200], asked, max_tokens=1 + which % 40, draft=draft)
        found.append(call)
        return call

    async def over(self):
        """Let everything end: no call waits for the test any more."""
        self.steps.gate.set()
        for call in self.calls:
            if call.state is CallState.WAITS_FOR_SLOTS:
                self.batches.refuse(call, NoBuffers("none"))
        for file in self.files:
            self.batches.exclusive(file, lambda: None)  # a loop that thinks lets go of its file
        await self.settled()


class Asked:
    """A request of a generation."""

    def __init__(self, number, ended):
        self.request = Request(Op.GENERATE, 0, number, 0, (0, 0, 0, 0), b"")
        self._ended = ended

    def send(self, args, payload=b""):
        pass

    def answer(self, outcome):
        self._ended()


@pytest.mark.slow
def test_calls_move_as_the_table_says_and_end_once(tmp_path_factory, monkeypatch):
    move, moved, visited, illegal = FileCall.move, set[FileCall](), set[CallState](), []

    def noted(call, state):
        moved.add(call)
        visited.update((call.state, state))
        try:
            move(call, state)
        except AssertionError as error:
            illegal.append(error)  # the daemon tells the program of it, as of any failure
            raise

    monkeypatch.setattr(FileCall, "move", noted)

    @given(
        num_on_disk=st.sampled_from([4, 40]),
        acts=st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 999)), min_size=20, max_size=80),
    )
    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    def anything(num_on_disk, acts):
        bench = Everything(tmp_path_factory.mktemp("house"), num_on_disk)
        moved.clear()

        async def scenario():
            for what, which in acts:
                await bench.act(what, which)
            await bench.over()
            assert not illegal
            told = [call for call in bench.told if call.early is not Early.GONE]
            assert sorted(map(id, bench.ended)) == sorted(map(id, told)), "each is answered once, if anybody is there"
            num_tokens = [each.program.used.tokens for each in bench.everybody]
            assert sum(num_tokens) == bench.batches.statistics.num_tokens, "every row that was computed is somebody's"
            for call in moved:
                assert call.state is CallState.OVER
                assert call.reservation is None
                assert call.num_promised == 0

        bench.run_test(scenario)

    anything()
    # Two are rare; test_standing has one test of each: of room that comes back, and of room that is being zeroed.
    assert visited >= set(CallState) - {CallState.WAITS_FOR_ROOM, CallState.EXTENDING}
