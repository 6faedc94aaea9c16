"""N-gram speculation: drafts tokens from earlier text, checks them in one step, cuts off wrong ones.

    symphony run ngram "Count: one, two, three, one, two, three," --max-tokens 60
    symphony run ngram "Count: one, two, three, one, two, three," --builtin

Text repeats itself. If the last tokens occurred earlier, the tokens that followed are a guess at the next tokens
(Saxena, "Prompt Lookup Decoding", 2023). One `pred(rows="all")` returns the model's token after each guess, so each
guess that the model agrees with saves a step. Wrong guesses are cut from the KV file. The output is always that of
greedy decoding. `generate(draft="ngram")` does the same inside the daemon: compare with --builtin.
"""

import sys
from collections.abc import Iterator
from itertools import islice, takewhile

import libsym as sym


def draft(text: list[int], match: int, length: int) -> list[int]:
    """Find the latest earlier place of the last `match` tokens; return up to `length` tokens that follow this place."""
    for at in reversed(range(match, len(text))):
        if text[at - match : at] == text[-match:]:
            return text[at : at + length]
    return []


def speculate(kv: sym.KV, tokens: list[int], match: int = 2, length: int = 8) -> Iterator[list[int]]:
    """Append `tokens`; yield the tokens that each step finds, until the context is full. `kv` lacks the last token."""
    text, room, pending = kv.read()[0] + tokens, kv.room(), tokens
    while True:
        guesses = draft(text, match, min(length, max(0, room - len(pending))))
        rows = sym.pred(kv, [*pending, *guesses], rows="all", top_k=1)
        said = [row.argmax() for row in rows][len(pending) - 1 :]  # the tokens after `pending` and after each guess
        num_right = next((i for i, guess in enumerate(guesses) if guess != said[i]), len(guesses))
        kv.truncate(len(text) + num_right)
        found = said[: num_right + 1]  # the right guesses, and the model's token after them
        yield found
        text, room, pending = text + found, room - len(pending) - num_right, found[-1:]
        if not room:
            return


@sym.command
def main(arguments: sym.Arguments) -> None:
    arguments.text("text", "the text to continue")
    arguments.whole("--max-tokens", "tokens to generate", 100)
    arguments.whole("--match", "last tokens that must occur earlier", 2, most=16)
    arguments.whole("--length", "tokens of a draft, at most", 8, most=64)
    arguments.add_argument("--builtin", action="store_true", help="have the daemon do it, in one call")
    args = arguments.parse_args()
    end = sym.model_info().eos_ids
    kv, prompt = sym.kv_create(), sym.tokenize(args.text)
    if args.builtin:
        how = sym.Ngram(max_tokens=args.length, min_match=args.match)
        answer = list(sym.generate(kv, prompt, draft=how, max_tokens=args.max_tokens))
    else:
        found = (token for step in speculate(kv, prompt, args.match, args.length) for token in step)
        answer = list(takewhile(lambda token: token not in end, islice(found, args.max_tokens)))
    sym.send_to_user(f"{args.text}{sym.detokenize(answer)}\n")
    used = sym.getrusage()
    print(f"{len(answer)} tokens in {used.steps} steps, {used.calls} calls", file=sys.stderr)
