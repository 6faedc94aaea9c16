"""The paper's second program: a precomputed prefix, and one fork and one thread for each query.

    symphony run lips/prefix.py "What is a fork?" "What is a spoon?"

`sys_msg.kv` is computed the first time and stays on the mount for the next run, and for other programs.
"""

from __future__ import annotations

import sys
import threading

import libsym as sym

PREFIX = "sys_msg.kv"
SYSTEM = "You answer in one short sentence."
MAX_TOKENS = 48


def conversation(query: str) -> list[int]:
    return sym.chat_tokens([{"role": "system", "content": SYSTEM}, {"role": "user", "content": query}])


def open_prefix() -> sym.KV:
    """What conversations with that system message begin with: from the mount, or computed once.

    However many runs begin at the same time, one computes it; and it has its name when it is whole.
    """
    one, two = conversation("One?"), conversation("Two!")
    return sym.kv_open_or_compute(PREFIX, one[: num_common(one, two)])


def num_common(one: list[int], two: list[int]) -> int:
    """How many tokens both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def decode(prefix: sym.KV, query: str, end: frozenset[int]) -> None:
    """Answer one query on a fork of the prefix."""
    kv = sym.kv_fork(prefix)
    tokens = conversation(query)
    position = num_common(tokens, sym.kv_read(prefix)[0])
    sym.kv_truncate(kv, position)  # a tokenizer may join the query's beginning to what comes before it
    tokens = tokens[position:]
    answer: list[int] = []
    while len(answer) < MAX_TOKENS:
        dist = sym.pred(kv, tokens, position)
        position += len(tokens)
        tokens = [dist.argmax()]
        if tokens[0] in end:
            break
        answer += tokens
    sym.send_to_user(f"{query} {sym.detokenize(answer).strip()}\n")
    sym.kv_remove(kv)


def main() -> None:
    queries = sys.argv[1:] or ["What is the capital of France?", "What is two plus two?", "What do bees make?"]
    end = sym.model_info().eos_ids
    prefix = open_prefix()
    threads = [threading.Thread(target=decode, args=(prefix, query, end)) for query in queries]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sym.kv_close(prefix)


if __name__ == "__main__":
    main()
