"""Swarm: agents, each a program of its own, draft answers and vote through messages and a topic.

    symphony run swarm "What should a small town build first?" --agents poet engineer banker

This program starts one program for each agent (`spawn`). Each agent has its own conversation. The agent sends its draft
to the coordinator's mailbox, and reads all drafts on a topic. Then it votes for another agent's draft: the draft that
is the likeliest next answer in its own conversation. The agents run side by side, and share the steps of the daemon.
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
    """Return the score of each draft as the next answer of a conversation: its tokens' mean log-probability."""
    asked = sym.chat_tokens([{"role": "user", "content": f"{question} Give the best answer."}], after_answer=True)
    found = {}
    for name, text in drafts.items():
        with chat.fork() as fork:
            before = fork.pending + asked
            likely = sym.score(fork.kv, before + sym.tokenize(text, special=False))[len(before) - 1 :]
            found[name] = fmean(likely or [-math.inf])
    return found


def agent(name: str, coordinator: int, topic: str, max_tokens: int) -> None:
    """Draft an answer, read the other drafts, and vote."""
    sym.subscribe(topic)  # before the first message to the coordinator, so that this agent misses none
    sym.send(coordinator, {"from": name, "pid": sym.getpid()})
    question = sym.recv()
    chat = sym.Chat(sym.kv_create(), f"You are a {name}. You answer in one short sentence.")
    draft = chat.ask(question, max_tokens=max_tokens, temperature=0.7).full_text()
    sym.send(coordinator, {"from": name, "draft": draft.strip()})
    drafts = {other: text for other, text in sym.recv(topic).items() if other != name}
    found = scores(chat, question, drafts)
    sym.send(coordinator, {"from": name, "vote": max(found, key=found.__getitem__)})


def watch(child: sym.Child, name: str) -> None:
    """Wait for the end of an agent, and report the end to the coordinator in a message."""
    ended = sym.wait(child)
    sym.send(sym.getpid(), {"from": name, "end": ended.reason})


def coordinate(question: str, names: list[str], max_tokens: int) -> tuple[dict[str, str], Counter[str]]:
    """Return the drafts and the votes of a swarm. Raise ChildProcessError if an agent ends too early."""
    me, said = sym.getpid(), dict[tuple[str, str], Any]()
    topic = f"swarm-{me}"
    words = [question, "--coordinator", str(me), "--topic", topic, "--max-tokens", str(max_tokens), "--agents"]
    for name in names:
        child = sym.spawn(__file__, [*words, name], name=re.sub(r"\W+", "-", f"swarm-{name}"))
        threading.Thread(target=watch, args=(child, name), daemon=True).start()

    def hear(what: str) -> dict[str, Any]:
        """Wait for one kind of message, such as "draft", from all agents; return them by agent."""
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
    arguments.text("--agents", "their roles", ["poet", "engineer", "banker"], nargs="+", metavar="ROLE")
    arguments.whole("--max-tokens", "of a draft", 40)
    arguments.whole("--coordinator", argparse.SUPPRESS)  # set for spawned agents
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
