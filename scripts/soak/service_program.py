"""Program of the soak that checks its own results: `service_program.py KIND DIRECTORY SEED`.

Each kind uses other system calls. `DIRECTORY` is on the mount, and no other program uses it.
"""

from __future__ import annotations

import random
import sys
import threading
import time

import anyio

import libsym as sym

SECONDS = 1.0
"""Approximate run time of the program."""


class Work:
    def __init__(self, directory: str, seed: int) -> None:
        self.directory = directory
        self.draw = random.Random(seed)
        self._ends_s = time.monotonic() + SECONDS

    def goes_on(self) -> bool:
        return time.monotonic() < self._ends_s

    def prompt(self, count: int = 20) -> list[int]:
        return [self.draw.randrange(1, 200) for _ in range(count)]

    # Kinds

    def pred(self) -> None:
        """Loop over pred() on a named file, and sync the file from time to time."""
        with sym.kv_create(f"{self.directory}/loop.kv") as kv:
            tokens = self.prompt()
            while self.goes_on():
                for _ in range(50):
                    tokens = [sym.pred(kv, tokens).argmax()]
                sym.kv_sync(kv)
                sym.kv_truncate(kv, 10)

    def generate(self) -> None:
        """Generate with one seed again and again. The tokens must be the same each time."""
        prompt, sampler = self.prompt(), sym.Sampler(temperature=0.8)
        known: list[int] = []
        while self.goes_on():
            with sym.kv_create() as kv:
                drawn = list(sym.generate(kv, prompt, sampler=sampler, seed=7, stop_at_end=False, max_tokens=60))
            assert known in ([], drawn), "the same seed has given other tokens"
            known = drawn

    def grammar(self) -> None:
        while self.goes_on():
            grammar = sym.Grammar.regex(f"x{self.draw.randrange(100)}[ab]{{3}}")
            with sym.kv_create() as kv:
                text = "".join(sym.generate(kv, self.prompt(), grammar=grammar).text())
            assert text.startswith("x"), text

    def tree(self) -> None:
        """Let threads append to forks of forks."""
        while self.goes_on():
            with sym.kv_create(f"{self.directory}/root.kv") as root:
                sym.kv_write(root, self.prompt(100))
                forks = [sym.kv_fork(root) for _ in range(4)]
                forks += [sym.kv_fork(each, f"{self.directory}/{number}.kv") for number, each in enumerate(forks)]
                threads = [threading.Thread(target=self._go_on, args=(each,)) for each in forks]
                for each in threads:
                    each.start()
                for each in threads:
                    each.join()
                for kv in (root, *forks[4:]):
                    sym.kv_remove(kv)
                for kv in forks[:4]:
                    kv.close()

    @staticmethod
    def _go_on(kv: sym.KV) -> None:
        tokens = [1]
        for _ in range(10):
            tokens = [sym.pred(kv, tokens).argmax()]

    def messages(self) -> None:
        """Send messages to this program from another thread."""
        me = sym.getpid()
        while self.goes_on():
            sender = threading.Thread(target=lambda: [sym.send(me, {"number": number}) for number in range(20)])
            sender.start()
            assert [sym.recv(timeout=30)["number"] for _ in range(20)] == list(range(20))
            sender.join()

    def spawn(self) -> None:
        child = sym.spawn(__file__, ["messages", self.directory, "1"])
        assert sym.wait(child).status == 0, "the child has failed"

    def aio(self) -> None:
        anyio.run(self._tasks)

    async def _tasks(self) -> None:
        async def one() -> None:
            async with await sym.aio.kv_create() as kv:
                generation = await sym.aio.generate(kv, self.prompt(), stop_at_end=False, max_tokens=30)
                assert len([token async for token in generation]) == 30

        while self.goes_on():
            async with anyio.create_task_group() as tasks:
                for _ in range(6):
                    tasks.start_soon(one)


KINDS = ("pred", "generate", "grammar", "tree", "messages", "spawn", "aio")


if __name__ == "__main__":
    kind, where, number = sys.argv[1:]
    getattr(Work(where, int(number)), kind)()
