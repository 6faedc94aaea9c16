"""A precomputed prefix, and one fork and one thread for each query: the second program of the paper.

    symphony run prefix "What is a fork?" "What is a spoon?"

`sys_msg.kv` is computed the first time and stays on the mount, for the next run and for other programs. What a query
costs is the query: its fork has the prefix in constant time, and all of them share the prefix's memory. The daemon
puts what the threads ask for at the same time into the same steps of the model.
"""

from concurrent.futures import ThreadPoolExecutor

import libsym as sym

PREFIX = "sys_msg.kv"
SYSTEM = "You answer in one short sentence."


def open_prefix() -> sym.KV:
    """Open the file that conversations with that system message begin with: from the mount, or computed once.

    However many runs begin at the same time, one computes the file. A file has its name when it is whole.
    """
    system = [{"role": "system", "content": SYSTEM}]
    return sym.kv_open_or_compute(PREFIX, sym.chat_tokens(system, add_generation_prompt=False))


def answer(prefix: sym.KV, query: str, max_tokens: int) -> None:
    """Answer one query on a fork of the prefix."""
    conversation = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": query}]
    with sym.kv_fork(prefix) as kv:
        tokens = sym.kv_rewind(kv, sym.chat_tokens(conversation))  # what is not in the prefix
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
            each.result()  # a query that has failed says so here, when all have ended
