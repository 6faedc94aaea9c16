"""Shortens a long conversation: in a new file, a summary replaces the old turns.

    symphony run compact chat.kv shorter.kv
    symphony run compact chat.kv shorter.kv --keep 4 --max-tokens 200

A conversation ends when its context is full. A service drops the oldest turns by itself; here the user decides, and
the original file stays. The model writes the summary in a fork of the file, which is cut before the last --keep turns.
So only the question and the answer are computed. The new file begins with the summary as the system message, and
continues with the last turns, word for word.
"""

from contextlib import suppress

import libsym as sym

QUESTION = {"role": "user", "content": "Summarize our conversation so far: what was asked, and what was answered."}
TOP = "{system}\nThe conversation so far, in short: {summary}"


def compact(kv: sym.KV, path: str, keep: int, max_tokens: int, system: str) -> tuple[int, int]:
    """Write the shorter conversation to `path`; return the number of tokens before and after."""
    with suppress(sym.NotFound):
        sym.kv_stat(path)
        raise sym.Exists(f"{path}: the name is taken; remove it first, or choose another")
    length, turns = kv.len(), [*(kv.stat().turns or ())]
    room = sym.model_info().max_positions - len(sym.chat_tokens([QUESTION], after_answer=True)) - max_tokens
    cuts = [at for at in [*turns, length][: max(len(turns) + 1 - keep, 0)] if at > 0]
    if cuts and cuts[0] > room:
        raise sym.Invalid(f"the context has no room for a summary of {max_tokens} tokens behind the first {cuts[0]}")
    if not (cuts := [at for at in cuts if at <= room]):
        raise sym.Invalid(f"the file records {len(turns)} turns, and the last {keep} stay: none is left to summarize")
    with sym.kv_fork(kv) as fork:
        fork.truncate(cuts[-1])
        summary = sym.Chat(fork).ask(QUESTION["content"], max_tokens=max_tokens).full_text().strip()
    top = {"role": "system", "content": TOP.format(system=system, summary=summary)}
    begin, rest = sym.chat_tokens([top], add_generation_prompt=False), kv.read(cuts[-1])[0]
    # The marks that end a turn are at the end of `begin`, and again at the start of `rest`.
    joint = next(n for n in range(len(begin), -1, -1) if begin[len(begin) - n :] == rest[:n])
    if len(begin) >= cuts[-1]:
        raise sym.Invalid(f"the summary takes {len(begin)} tokens, and what it stands for {cuts[-1]}: nothing is saved")
    with sym.kv_create() as new:
        new.write(begin + rest[joint:])
        new.fork(path).close()  # the name appears only with the complete file
        return length, new.len()


@sym.command
def main(arguments: sym.Arguments) -> None:
    arguments.kv("file", "the conversation")
    arguments.kv("new", "the shorter one, which is made")
    arguments.whole("--keep", "turns that stay as they are", 2, least=0)
    arguments.whole("--max-tokens", "of the summary", 150)
    arguments.text("--system", "how the new conversation begins", "You are a helpful assistant.")
    args = arguments.parse_args()
    with sym.kv_fork(args.file, ended=True) as kv:
        before, after = compact(kv, args.new, args.keep, args.max_tokens, args.system)
    sym.send_to_user(f"{args.file} has {before} tokens, {args.new} {after}\n")
