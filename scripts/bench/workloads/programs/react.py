"""An agent that thinks, calls a tool, reads what it says, and thinks on: its context stays in its file meanwhile."""

from __future__ import annotations

import time

from work import Answer, give, take

import libsym as sym


def main() -> None:
    sym.connect()
    work = take()
    answers = []
    with sym.kv_open_or_compute(work["name"], work["system"]) as system, sym.kv_fork(system) as kv:
        tokens = work["task"]
        for observation in [*work["observations"], None]:
            asked_s, thought, came_s = time.monotonic(), [], []
            generation = sym.generate(kv, tokens, max_tokens=work["num_tokens"], stop_at_end=False)
            for token in generation:
                thought.append(token)
                came_s.append(time.monotonic())
            answers.append(Answer(tokens=thought, asked_s=asked_s, came_s=came_s))
            if observation is not None:
                time.sleep(work["tool_s"])  # the tool
                tokens = [*generation.pending, *observation]
    give(answers)


main()
