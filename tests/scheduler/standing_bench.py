"""A standing run whose steps are held by the test, and a program that is a real channel.

What steps compute is that the next token is the last one and one more; the test reads and writes the rings itself.
"""

import os
import struct
from typing import Any

import numpy as np
import trio

from libsym.abi import ROWS_LAST, Op
from libsym.channel.server import Request, ServerChannel
from scheduler.batch.batch_scheduler import BatchScheduler
from scheduler.batch.policy import StepLimits
from scheduler.connection.lip import Lip
from scheduler.connection.system_call import SystemCall
from scheduler.operations.appending import Limited
from scheduler.operations.pred import Predicting
from tests.scheduler.bench import ME, VOCAB_SIZE, Bench, Steps, new_generation
from tests.scheduler.rings import Rings, frame_of


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
        self.rings = Rings(self.program.channel.memory[1])
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
        config: Any = self.model.config
        Predicting(self.batches, lambda _file: Limited(config)).pred(SystemCall(self.program, request))

    def ring(self, handle, number, token):
        """The next token by the ring, without a doorbell."""
        self.rings.write(frame_of(Op.PRED, number, handle, (1, 0, 0, 0), struct.pack("=i", token), ROWS_LAST))

    def replies(self):
        """Return all that came since the last time."""
        found = self.rings.read()
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
        while not (found := self.replies()):
            await trio.sleep(0.001)
            self.batches.sync()
        return found

    async def until(self, condition):
        while not condition():
            await trio.sleep(0.001)
            self.batches.sync()

    def run_test(self, scenario):
        super().run_test(scenario)
        self.close()

    def close(self):
        self.batches.drop(self.program)
        self.rings.close()
        self.program.channel.close()
