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


def open_prefix() -> sym.KV:
    """The system message's KV: from the mount, or computed once."""
    try:
        return sym.kv_open(PREFIX)
    except sym.NotFound:
        text = sym.chat_template([{"role": "system", "content": SYSTEM}], add_generation_prompt=False)
        kv = sym.kv_create(PREFIX)
        sym.kv_write(kv, sym.tokenize(text))
        return kv


def decode(prefix: sym.KV, query: str, end: frozenset[int]) -> None:
    """Answer one query on a fork of the prefix."""
    kv = sym.kv_fork(prefix)
    tokens = sym.tokenize(f"<|im_start|>user\n{query}<|im_end|>\n<|im_start|>assistant\n")
    position = prefix.len()
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
