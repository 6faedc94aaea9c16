"""A busy program for the pictures: `busy.py KIND SEED`. The program behaves like others of its kind until its end."""

import random
import sys
import threading
import time

import libsym as sym

HANDBOOK = "Refunds are paid within thirty days. Orders above fifty euros are sent without a charge. " * 12
QUESTIONS = ["Is a refund possible?", "Where is my order?", "Who pays for the parcel?", "May I speak to a person?"]


def agent(random_: random.Random) -> None:
    """Forks a shared context, answers, and calls a slow tool."""
    base = sym.kv_open_or_compute("handbook.kv", sym.tokenize(HANDBOOK))
    while True:
        with sym.kv_fork(base) as kv:
            list(sym.generate(kv, sym.tokenize(random_.choice(QUESTIONS)), max_tokens=random_.randint(10, 40)))
        time.sleep(random_.expovariate(3))


def chat(random_: random.Random) -> None:
    """Continues a conversation in a file, with a person's pauses."""
    name = f"chats/{random_.randint(100, 999)}.kv"
    sym.kv_mkdir("chats", parents=True)
    while True:
        with sym.kv_open_or_compute(name, sym.tokenize("You are kind and brief.\n"), "rw") as kv:
            list(sym.generate(kv, sym.tokenize(random_.choice(QUESTIONS)), max_tokens=random_.randint(20, 60)))
        time.sleep(random_.uniform(0.3, 1.5))


def reader(random_: random.Random) -> None:
    """Computes long texts by prefills."""
    while True:
        with sym.kv_create() as kv:
            sym.kv_write(kv, sym.tokenize(HANDBOOK * random_.randint(1, 3)))
        time.sleep(random_.uniform(0.5, 1.5))


def search(random_: random.Random) -> None:
    """Calls pred() in loops in several threads, each on a fork of its own."""
    base = sym.kv_open_or_compute("plans/base.kv", sym.tokenize("A plan of five steps:"))

    def branch(seed: int) -> None:
        own = random.Random(seed)
        while True:
            with sym.kv_fork(base) as kv:
                tokens = sym.tokenize(" ")
                for _ in range(own.randint(10, 50)):
                    tokens = [sym.pred(kv, tokens).sample(temperature=0.8)]
            time.sleep(own.expovariate(2))

    for _ in range(3):
        threading.Thread(target=branch, args=(random_.randint(0, 999),), daemon=True).start()
    threading.Event().wait()


def swarm(random_: random.Random) -> None:
    """Agents with one handbook, each with an answer of its own."""
    base = sym.kv_open_or_compute("handbook.kv", sym.tokenize(HANDBOOK))
    agents = [sym.kv_fork(base) for _ in range(6)]
    for kv in agents:
        list(sym.generate(kv, sym.tokenize(random_.choice(QUESTIONS)), max_tokens=random_.randint(10, 60)))
    threading.Event().wait()


def beam(_random: random.Random) -> None:
    """Eight beams: each step keeps the eight likeliest of all continuations, and the files on the way to them."""
    base = sym.kv_open_or_compute("beam.kv", sym.tokenize("The three best reasons to write are these:"))
    first, levels = sym.kv_fork(base), list[list[sym.KV]]()
    beams = [(0.0, first, sym.pred(first, sym.tokenize("\n")))]
    for _ in range(3):
        found = [(s + logprob, kv, token) for s, kv, dist in beams for token, logprob in dist.topk(8)]
        best = sorted(found, key=lambda each: -each[0])[:8]
        forks = [sym.kv_fork(kv) for _, kv, _ in best]
        levels.append(forks)
        beams = [(s, kv, sym.pred(kv, [token])) for (s, _, token), kv in zip(best, forks, strict=True)]
    threading.Event().wait()


def mcts(random_: random.Random) -> None:
    """A tree search of 500 nodes, whose good nodes get most of the visits."""
    nodes = [sym.kv_open_or_compute("mcts.kv", sym.tokenize("A proof in five steps:"))]
    while len(nodes) < 500:
        kv = sym.kv_fork(nodes[int(len(nodes) * random_.random() ** 3)])
        sym.kv_write(kv, [random_.randint(100, 40000) for _ in range(random_.randint(1, 12))])
        nodes.append(kv)
    threading.Event().wait()


if __name__ == "__main__":
    KINDS = {kind.__name__: kind for kind in (agent, chat, reader, search, swarm, beam, mcts)}
    if sys.argv[1] == "search":
        sym.kv_mkdir("plans", parents=True)
    KINDS[sys.argv[1]](random.Random(int(sys.argv[2])))
