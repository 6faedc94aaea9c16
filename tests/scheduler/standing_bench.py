"""A standing run whose steps are held by the test, and a program that is a real channel.

What steps compute is that the next token is the last one and one more; the test reads and writes the rings itself.
"""

import os
import struct

import numpy as np
import trio

from libsym.abi import MORE, REPLY_STRUCT, REQUEST_STRUCT, RING_BYTES, ROWS_LAST, Op
from libsym.channel.server import Request, ServerChannel
from scheduler.batch.batch_scheduler import BatchScheduler
from scheduler.batch.policy import StepLimits
from scheduler.connection.lip import Lip
from scheduler.connection.system_call import SystemCall
from scheduler.operations.appending import Limited
from scheduler.operations.pred import Predicting
from tests.scheduler.bench import ME, VOCAB_SIZE, Bench, Steps, new_generation

SUBMIT_TAIL, COMPLETE_HEAD, COMPLETE_TAIL = 128, 192, 320
SUBMIT_RING = 8192
COMPLETE_RING = SUBMIT_RING + RING_BYTES


class CountingSteps(Steps):
    """The next token is the last one and one more."""

    def __init__(self):
        super().__init__()
        self.before = lambda _batch: None
        """Waits as a test wants."""

    def step(self, batch):
        super().step(batch)
        self.before(batch)
        for chunk in batch.chunks:
            for index, row in enumerate(chunk.rows, len(chunk.tokens) - len(chunk.rows)):
                logits = np.asarray(row)
                logits[:] = 0
                logits[(chunk.tokens[index] + 1) % VOCAB_SIZE] = 9


class Standing(Bench):
    """A program with rings, and steps that are held."""

    def __init__(self, directory, limits=None, **memory):
        super().__init__(directory, limits=limits or StepLimits(), **({"num_pages": 512} | memory))
        self.steps = CountingSteps()
        config = self.model.config
        self.batches = BatchScheduler(self.fs, self.steps, config.max_positions, config.vocab_size, self._limits)
        self.program = Lip(os.getpid(), ME, ServerChannel.create(VOCAB_SIZE))
        self.region = self.program.channel.memory[1]
        self.words = np.frombuffer(self.region, np.uint64, 64)
        self.num_submitted = 0
        self.heard = []
        """Replies that came so far."""

    # What the program does

    def decode(self, file, number, token=7):
        """A call that the run goes on from; gives its handle."""
        handle = self.program.add(file)
        self.decode_on(handle, number, token)
        return handle

    def decode_on(self, handle, number, token=8):
        """Submit one more call of the program by the gate."""
        self.program.stream = 0  # as of a ring's calls
        request = Request(Op.PRED, ROWS_LAST, number, handle, (1, 0, 0, 0), struct.pack("=i", token))
        self.ask(request)

    def ask(self, request):
        Predicting(self.batches, Limited(self.model.config)).pred(SystemCall(self.program, request))

    def ring(self, handle, number, token):
        """The next token by the ring, without a doorbell."""
        frame = REQUEST_STRUCT.pack(68, Op.PRED, 0, ROWS_LAST, 0, number, handle, 1, 0, 0, 0) + struct.pack("=i", token)
        at = SUBMIT_RING + self.num_submitted
        self.region[at : at + 128] = frame.ljust(128, b"\0")
        self.num_submitted += 128
        self.words[SUBMIT_TAIL // 8] = self.num_submitted

    def replies(self):
        """(id, errno, whether others follow, args, payload) of all that came so far."""
        at, end, found = int(self.words[COMPLETE_HEAD // 8]), int(self.words[COMPLETE_TAIL // 8]), []
        while at < end:
            head = COMPLETE_RING + at % RING_BYTES
            frame_bytes, err, number, *args, flags, _, _ = REPLY_STRUCT.unpack_from(self.region, head)
            found.append((number, err, bool(flags & MORE), tuple(args), self.region[head + 64 : head + frame_bytes]))
            at += -(-frame_bytes // 64) * 64
        self.words[COMPLETE_HEAD // 8] = at
        self.heard += found
        return found

    def tokens_of(self, number):
        """Return the tokens that a generation has sent until now."""
        self.replies()
        payloads = b"".join(payload for each, err, _, _, payload in self.heard if each == number and not err)
        return list(memoryview(payloads).cast("i"))

    def generate(self, file, tokens, number, max_tokens=4, decide=None, draft=None):
        request = Request(Op.GENERATE, 0, number, self.program.add(file), (len(tokens), 0, max_tokens, 0), b"")
        call = new_generation(
            self.program, file, tokens, SystemCall(self.program, request), max_tokens=max_tokens, draft=draft
        )
        if decide is not None:
            call.grammar = decide
        self.batches.submit(call)
        return call

    async def settled(self):
        await self.until(lambda: not self.batches.num_waiting)

    async def go_on(self):
        """Let steps go on, until nobody waits for any."""
        self.steps.gate.set()
        await self.settled()

    async def answered(self):
        """Return the replies that come next."""
        found = []
        await self.until(lambda: found.extend(self.replies()) or found)
        return found

    async def until(self, condition):
        while not condition():
            await trio.sleep(0.001)
            self.batches.sync()

    def run(self, scenario):
        super().run(scenario)
        self.close()

    def close(self):
        self.batches.drop(self.program)
        del self.words
        self.program.channel.close()
