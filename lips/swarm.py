"""A swarm: agents, each a program of its own, that draft answers and vote, over messages and a topic.

    symphony run swarm "What should a small town build first?" --agents poet engineer banker

This program starts one more program for each agent (`spawn`). Each has its own conversation, sends its draft to the
coordinator's mailbox, reads all drafts on a topic, and votes for the one that its model finds likeliest, its own left
out. They run side by side, and their steps are shared.
"""

import argparse
import math
import re
import threading
from collections import Counter
from statistics import fmean
from typing import Any

import libsym as sym


def scores(chat: sym.Chat, question: str, drafts: dict[str, str]) -> dict[str, float]:
    """Return the likelihood of each draft as the next answer of a conversation: its tokens' mean log-probability."""
    asked = sym.chat_tokens([{"role": "user", "content": f"{question} Give the best answer."}], after_answer=True)
    found = {}
    for name, text in drafts.items():
        with chat.fork() as fork:
            before = fork.pending + asked
            likely = sym.score(fork.kv, before + sym.tokenize(text, special=False))[len(before) - 1 :]
            found[name] = fmean(likely or [-math.inf])
    return found


def agent(name: str, coordinator: int, topic: str, max_tokens: int) -> None:
    """Drafts, reads, votes."""
    sym.subscribe(topic)  # before it says that it is there: no message is missed
    sym.send(coordinator, {"from": name, "pid": sym.getpid()})
    question = sym.recv()
    chat = sym.Chat(sym.kv_create(), f"You are a {name}. You answer in one short sentence.")
    draft = chat.ask(question, max_tokens=max_tokens, temperature=0.7).full_text()
    sym.send(coordinator, {"from": name, "draft": draft.strip()})
    drafts = {other: text for other, text in sym.recv(topic).items() if other != name}
    found = scores(chat, question, drafts)
    sym.send(coordinator, {"from": name, "vote": max(found, key=found.__getitem__)})


def watch(child: sym.Child, name: str) -> None:
    """Has the coordinator hear of an agent's end as of what agents say."""
    ended = sym.wait(child)
    sym.send(sym.getpid(), {"from": name, "end": ended.reason})


def coordinate(question: str, names: list[str], max_tokens: int) -> tuple[dict[str, str], Counter[str]]:
    """The drafts and the votes of a swarm; an agent that ends before it has said its part is an error."""
    me, said = sym.getpid(), dict[tuple[str, str], Any]()
    topic = f"swarm-{me}"
    words = [question, "--coordinator", str(me), "--topic", topic, "--max-tokens", str(max_tokens), "--agents"]
    for name in names:
        child = sym.spawn(__file__, [*words, name], name=re.sub(r"\W+", "-", f"swarm-{name}"))
        threading.Thread(target=watch, args=(child, name), daemon=True).start()

    def hear(what: str) -> dict[str, Any]:
        """Of each agent its draft, say."""
        while missing := [name for name in names if (name, what) not in said]:
            if gone := [name for name in missing if (name, "end") in said]:
                raise ChildProcessError(f"{gone[0]} ended before its {what} came: {said[gone[0], 'end']}")
            message = sym.recv()
            (kind,) = message.keys() - {"from"}
            said[message["from"], kind] = message[kind]
        return {name: said[name, what] for name in names}

    for pid in hear("pid").values():
        sym.send(pid, question)
    drafts = hear("draft")
    sym.send(topic, drafts)
    return drafts, Counter(hear("vote").values())


@sym.command
def main(arguments: sym.Arguments) -> None:
    arguments.text("question")
    arguments.text("--agents", "who they are", ["poet", "engineer", "banker"], nargs="+", metavar="ROLE")
    arguments.whole("--max-tokens", "of a draft", 40)
    arguments.whole("--coordinator", argparse.SUPPRESS)  # of an agent that was spawned
    arguments.text("--topic", argparse.SUPPRESS)
    args = arguments.parse_args()
    if args.coordinator is not None:
        try:
            agent(args.agents[0], args.coordinator, args.topic, args.max_tokens)
        except sym.SymError as error:
            sym.send(args.coordinator, {"from": args.agents[0], "end": str(error)})
            raise
        return
    if len(set(args.agents)) < 2 or len(set(args.agents)) < len(args.agents):
        arguments.error("a swarm has two agents at least, and each has a role of its own")
    drafts, votes = coordinate(args.question, args.agents, args.max_tokens)
    for name, draft in sorted(drafts.items(), key=lambda each: -votes[each[0]]):
        print(f"{votes[name]} {name}: {draft}")
