"""A session that pauses, for a tool or a person. Its context stays in its file; where that is, is not its business."""

from __future__ import annotations

import time

from work import Answer, give, take

import libsym as sym


def main() -> None:
    sym.connect()
    work = take()
    answers = []
    time.sleep(work["begin_s"])
    with sym.kv_create() as kv:
        pending: list[int] = []
        for number, turn in enumerate(work["turns"]):
            asked_s, said, came_s = time.monotonic(), [], []
            generation = sym.generate(kv, [*pending, *turn["say"]], max_tokens=work["num_tokens"], stop_at_end=False)
            for token in generation:
                said.append(token)
                came_s.append(time.monotonic())
            label = work["label"] if number else f"{work['label']} begins"
            answers.append(Answer(tokens=said, asked_s=asked_s, came_s=came_s, label=label))
            pending = generation.pending
            time.sleep(turn["pause_s"] - work["typing_s"])
            if work["typing_s"]:  # the person types: what comes next needs the context
                sym.kv_advise(kv, sym.WILLNEED)
                time.sleep(work["typing_s"])
    give(answers)


main()
