"""Programs that pause, many at a time, over a daemon whose memory holds a part of their files.

Each says a line of JSON for what it has computed, and for what is synced; the same program says the same on any daemon.
"""

import json
import signal
import subprocess
from dataclasses import dataclass, field

from tests.symphony.daemons import Daemon

SOURCE = """
    import hashlib, json, random
    number, num_rounds, pause_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    rng = random.Random(number)
    said = hashlib.sha256()
    def note(what):
        said.update(bytes(memoryview(what.logits)) if isinstance(what, sym.Dist) else repr(what).encode())
    def tell(**facts):
        print(json.dumps(facts), flush=True)
    kv = sym.kv_create(f"p{number}.kv")
    note(sym.pred(kv, [(number * 7 + each * 3) % 250 for each in range(150 + number)]))
    for round in range(num_rounds):
        time.sleep(rng.uniform(0, pause_s))
        for token in range(4):
            note(sym.pred(kv, [token + round]))
        time.sleep(rng.uniform(0, pause_s))
        note(list(sym.generate(kv, [round], max_tokens=8, draft="ngram", seed=number)))
        fork = sym.kv_fork(kv)
        grammar = sym.Grammar.regex("(yes|no), thank you[.!]")
        note(list(sym.generate(fork, [65], sampler=sym.Sampler.greedy(), grammar=grammar, stop=["you!"])))
        forks = [sym.kv_fork(fork) for _ in range(3)]
        for dist in sym.pred_batch([sym.Pred(each, [place]) for place, each in enumerate(forks)]):
            note(dist)
        for each in (fork, *forks): sym.kv_close(each)
        if round % 2: kv.truncate(len(kv) - 5)
        sym.kv_sync(kv)
        probe = sym.kv_fork(kv)
        row = hashlib.sha256(bytes(memoryview(sym.pred(probe, [7]).logits))).hexdigest()
        tell(synced=len(kv), tokens=[int(each) for each in kv.read()[0]], row=row)
        sym.kv_close(probe)
    tell(said=said.hexdigest())
"""

AFTER = """
    import hashlib, json
    for name, wanted in json.loads(sys.stdin.read()).items():
        kv = sym.kv_open(name)
        fork = sym.kv_fork(kv)
        tokens = [int(each) for each in fork.read()[0]]
        assert tokens[: len(wanted["tokens"])] == wanted["tokens"], name
        fork.truncate(len(wanted["tokens"]))
        row = hashlib.sha256(bytes(memoryview(sym.pred(fork, [7]).logits))).hexdigest()
        assert row == wanted["row"], name
        print(name)
    sym.daemon_check()
"""
"""Program that checks the synced files: each is there, and further tokens are computed to the same bits."""


@dataclass
class Said:
    result: str = ""
    synced: dict[str, object] = field(default_factory=dict)
    """The last of those."""
    num_synced: int = 0

    def take(self, line: str) -> None:
        facts = json.loads(line)
        if "synced" in facts:
            self.synced, self.num_synced = facts, self.num_synced + 1
        self.result = facts.get("said", "")


class Crowd:
    """Programs that run at once."""

    def __init__(self, daemon: Daemon, num_programs: int, num_rounds: int, pause_s: float) -> None:
        self.processes: list[subprocess.Popen[str]] = [
            daemon.program(SOURCE, str(number), str(num_rounds), str(pause_s)) for number in range(num_programs)
        ]
        self.said = [Said() for _ in range(num_programs)]

    def end(self, number: int) -> None:
        """Kill a program, as a user does who is tired of waiting."""
        self.processes[number].kill()

    def until_each_has_synced(self, times: int) -> None:
        """Read the programs' messages until each has synced its file this many times."""
        for process, said in zip(self.processes, self.said, strict=True):
            while said.num_synced < times:
                assert process.stdout is not None
                line = process.stdout.readline()
                assert line, "a program has ended"
                said.take(line)

    def wait(self, timeout_s: float, *, may_fail: bool = False) -> list[Said]:
        """Wait for all programs, and return the messages of each, in order."""
        for process, said in zip(self.processes, self.said, strict=True):
            out, err = process.communicate(timeout=timeout_s)
            assert may_fail or process.returncode in (0, -signal.SIGKILL), err
            for line in out.splitlines():
                if line.endswith("}"):  # it was killed while it wrote the last, perhaps
                    said.take(line)
        return self.said


def check_what_was_synced(daemon: Daemon, said: list[Said]) -> int:
    """How many files have what was synced; none is cut below that. AssertionError: something is missing."""
    wanted = {f"p{number}.kv": each.synced for number, each in enumerate(said) if each.synced}
    process = daemon.program(AFTER)
    out, err = process.communicate(json.dumps(wanted), timeout=100)
    assert process.returncode == 0, err
    return len(out.splitlines())
