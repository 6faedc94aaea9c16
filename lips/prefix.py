"""Shared prefix: computed once, and forked for each query; the second program of the paper.

    symphony run prefix "What is a fork?" "What is a spoon?"

The first run computes `sys_msg.kv`, which stays on the mount for later runs and other programs. A query costs only its
own tokens: its fork has the prefix in constant time, and all forks share the memory of the prefix. The daemon puts
simultaneous calls of the threads into the same steps of the model.
"""

from concurrent.futures import ThreadPoolExecutor

import libsym as sym

PREFIX = "sys_msg.kv"
SYSTEM = "You answer in one short sentence."


def open_prefix() -> sym.KV:
    """Open the file of the system message, with which all conversations begin; compute it if it does not exist.

    If several runs begin at the same time, one of them computes the file. The name appears when the file is complete.
    """
    system = [{"role": "system", "content": SYSTEM}]
    return sym.kv_open_or_compute(PREFIX, sym.chat_tokens(system, add_generation_prompt=False))


def answer(prefix: sym.KV, query: str, max_tokens: int) -> None:
    """Answer one query on a fork of the prefix."""
    conversation = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": query}]
    with sym.kv_fork(prefix) as kv:
        tokens = sym.kv_rewind(kv, sym.chat_tokens(conversation))  # the tokens that the prefix does not have
        words = sym.decode(kv, tokens, sym.Dist.argmax, max_tokens=max_tokens).full_text()
    sym.send_to_user(f"{query} {words.strip()}\n")


@sym.command
def main(arguments: sym.Arguments) -> None:
    arguments.text("query", "a question", nargs="+")
    arguments.whole("--max-tokens", "of an answer", 48)
    args = arguments.parse_args()
    with open_prefix() as prefix:
        with ThreadPoolExecutor(len(args.query)) as threads:
            begun = [threads.submit(answer, prefix, query, args.max_tokens) for query in args.query]
        for each in begun:
            each.result()  # raises the error of a failed query, after all have ended
