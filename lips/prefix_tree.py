"""Prefix tree: asks every question about every document, and computes each shared part once.

    symphony run prefix_tree --document bees.md --document ants.md "What do they eat?" "Where do they live?"
    symphony run prefix_tree --system "Be brief." --system "Be funny." --document bees.md "What do they eat?"

Prompts with common beginnings form a tree: system message, document, question. Here each node is a KV file, and the
directories on the mount have the shape of the tree (`find /kv/prefix_tree`). Each file forks the file above it and adds
its own message. A prompt costs only the tokens that it shares with no other prompt. All answers are decoded at the same
time, and the next run finds the tree again.
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence

import libsym as sym

Message = Mapping[str, str]
Level = Mapping[str, Message]  # alternative messages for one place of the conversation, by the names of their nodes


def grow(
    parent: sym.KV, before: Sequence[Message], levels: Sequence[Level], directory: str, max_tokens: int
) -> Iterator[tuple[str, sym.Generation]]:
    """Make a node for each message of the first level, and the other levels below. Yield the last level's answers."""
    sym.kv_mkdir(directory, parents=True)
    for name, message in levels[0].items():
        path, messages, is_last = f"{directory}/{name}", [*before, message], len(levels) == 1
        try:
            node = sym.kv_fork(parent, f"{path}.kv")
        except sym.Exists:
            node = sym.kv_open(f"{path}.kv", "rw")  # from an earlier run, with tokens that are computed already
        missing = sym.kv_rewind(node, sym.chat_tokens(messages, add_generation_prompt=is_last))
        if is_last:
            yield path, sym.generate(node, missing, max_tokens=max_tokens)  # in flight from here on
        else:
            try:
                sym.kv_write(node, missing)
            except sym.Invalid:
                node.remove()  # the message does not fit into the context: leave no half node
                raise
            yield from grow(node, messages, levels[1:], path, max_tokens)


def level(role: str, texts: Sequence[tuple[str, str]]) -> Level:
    """Return the messages by names for files: a number, and the beginning of the message's own name."""
    names = (re.sub(r"\W+", "-", f"{number} {name}")[:40].strip("-") for number, (name, _) in enumerate(texts))
    return {name: {"role": role, "content": text} for name, (_, text) in zip(names, texts, strict=True)}


@sym.command
def main(arguments: sym.Arguments) -> None:
    arguments.text("question", nargs="+")
    arguments.document("--document", "a text file; may come again", action="append", required=True)
    arguments.text("--system", "a system message; may come again", action="append")
    arguments.kv("--tree", "the tree's directory on the mount", "prefix_tree")
    arguments.whole("--max-tokens", "of an answer", 48)
    args = arguments.parse_args()
    levels = [
        level("system", [(text, text) for text in args.system or ["You answer in one short sentence."]]),
        level("user", args.document),
        level("user", [(text, text) for text in args.question]),
    ]
    with sym.kv_open(f"{args.tree}.kv", "a") as root, root.lock():  # an empty file: its lock admits one run at a time
        too_long = 0
        for path, answer in list(grow(root, [], levels, args.tree, args.max_tokens)):
            try:
                text = answer.full_text().strip()
            except sym.Invalid as error:
                sym.kv_remove(f"{path}.kv")
                text, too_long = str(error), too_long + 1
            sym.send_to_user(f"{path}: {text}\n")
    if too_long:
        sys.exit(f"prefix_tree: {too_long} prompts are longer than the context")
