"""A swarm: agents, each a program of its own, that draft answers and vote, over messages and a topic.

    symphony run swarm "What should a small town build first?" --agents poet engineer banker

This program starts one more program for each agent (`spawn`). Each has its own conversation, sends its draft to the
coordinator's mailbox, reads all drafts on a topic, and votes for the one that its model finds likeliest, its own left
out. They run side by side, and their steps are shared.
"""

from __future__ import annotations

import argparse
from collections import Counter
from statistics import fmean

import libsym as sym


def agent(name: str, coordinator: int, topic: str, max_tokens: int) -> None:
    """Drafts, reads, votes."""
    sym.subscribe(topic)  # before it says that it is there: no message is missed
    sym.send(coordinator, {"from": name, "pid": sym.getpid()})
    question = sym.recv()
    chat = sym.Chat(sym.kv_create(), f"You are a {name}. You answer in one short sentence.")
    draft = chat.ask(question, max_tokens=max_tokens, sampler=sym.Sampler(temperature=0.7)).full_text()
    sym.send(coordinator, {"from": name, "draft": draft.strip()})
    drafts = {other: text for other, text in sym.recv(topic).items() if other != name}
    last = sym.chat_tokens([{"role": "user", "content": f"{question} Give the best answer."}], after_answer=True)
    scores = {}
    for other, text in drafts.items():
        with chat.kv.fork() as kv:
            scores[other] = fmean(
                sym.score(kv, [*last, *sym.tokenize(text, special=False)])[len(last) - 1 :] or [-99.0]
            )
    sym.send(coordinator, {"from": name, "vote": max(scores, key=scores.__getitem__)})


def coordinate(question: str, names: list[str], max_tokens: int) -> tuple[dict[str, str], Counter[str]]:
    """The drafts and the votes of a swarm."""
    me = sym.getpid()
    topic = f"swarm-{me}"
    options = ["--coordinator", str(me), "--topic", topic, "--max-tokens", str(max_tokens)]
    children = [sym.spawn(__file__, [question, "--agents", name, *options], name=f"swarm-{name}") for name in names]
    there = {message["from"]: message["pid"] for message in (sym.recv(timeout=60) for _ in names)}
    for pid in there.values():
        sym.send(pid, question)
    drafts = {message["from"]: message["draft"] for message in (sym.recv(timeout=300) for _ in names)}
    sym.send(topic, drafts)
    votes = Counter(sym.recv(timeout=300)["vote"] for _ in names)
    for child in children:
        sym.wait(child)
    return drafts, votes


def main() -> None:
    arguments = sym.Arguments(__doc__)
    arguments.text("question")
    arguments.text("--agents", "who they are", ["poet", "engineer", "banker"], nargs="+", metavar="ROLE")
    arguments.whole("--max-tokens", "of a draft", 40)
    arguments.whole("--coordinator", argparse.SUPPRESS)  # of an agent that was spawned
    arguments.text("--topic", argparse.SUPPRESS)
    args = arguments.parse_args()
    if args.coordinator is not None:
        agent(args.agents[0], args.coordinator, args.topic, args.max_tokens)
        return
    if len(set(args.agents)) < 2 or len(set(args.agents)) < len(args.agents):
        arguments.error("a swarm has two agents at least, and each has a role of its own")
    drafts, votes = coordinate(args.question, args.agents, args.max_tokens)
    for name, draft in sorted(drafts.items(), key=lambda each: -votes[each[0]]):
        print(f"{votes[name]} {name}: {draft}")


if __name__ == "__main__":
    sym.main(main)
