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


if __name__ == "__main__":
    KINDS = {"agent": agent, "chat": chat, "reader": reader, "search": search}
    if sys.argv[1] == "search":
        sym.kv_mkdir("plans", parents=True)
    KINDS[sys.argv[1]](random.Random(int(sys.argv[2])))
