"""Tree speculation: drafts several continuations as one tree, and checks all of them in one step.

    symphony run tree_speculation "Count: one, two, three, one, two, three," --max-tokens 60

If the last tokens occurred earlier more than once, different tokens may have followed them. A single draft (`ngram`)
bets on the latest occurrence. Here the drafts form a tree with their common beginnings as shared branches. A mask lets
each guess see only the text and its own branch. The depth of a guess in the tree sets its position. So one `pred()`
returns the model's token after every guess (Miao et al., "SpecInfer", 2024). The branch that agrees longest with the
model is kept; the other branches are dropped from the file. The output is always that of greedy decoding.
"""

import sys
from collections.abc import Iterator
from itertools import islice, takewhile

import libsym as sym


def drafts(text: list[int], match: int, width: int, length: int) -> list[list[int]]:
    """Return up to `width` distinct texts that followed earlier places of the last `match` tokens, the latest first."""
    found = dict[tuple[int, ...], None]()
    for at in reversed(range(match, len(text))):
        if text[at - match : at] == text[-match:]:
            found[tuple(text[at : at + length])] = None
        if len(found) == width:
            break
    return [list(each) for each in found]


def tree(texts: list[list[int]]) -> tuple[list[int], list[list[int]]]:
    """Return the tokens of a tree of the texts, and for each token the indexes of its branch, its own index last."""
    tokens, lines, known = list[int](), list[list[int]](), dict[tuple[int, ...], list[int]]()
    for text in texts:
        for depth in range(1, len(text) + 1):
            beginning = tuple(text[:depth])
            if beginning not in known:
                known[beginning] = [*known.get(beginning[:-1], []), len(tokens)]
                tokens.append(text[depth - 1])
                lines.append(known[beginning])
    return tokens, lines


def speculate(kv: sym.KV, tokens: list[int], match: int = 2, width: int = 4, length: int = 8) -> Iterator[list[int]]:
    """Append `tokens`; yield the tokens that each step finds, at least one. `kv` lacks the latest token."""
    found = [sym.pred(kv, tokens, top_k=1).argmax()]
    yield found
    text = kv.read()[0] + found
    while room := kv.room():
        guesses, lines = tree([each[: room - 1] for each in drafts(text, match, width, length)])
        base = len(text)  # all guesses see the entries of the file and the last token
        masks = [[True] * base + [number in line for number in range(len(guesses))] for line in [[], *lines]]
        positions = [base - 1, *(base + len(line) - 1 for line in lines)]
        rows = sym.pred(kv, text[-1:] + guesses, positions, rows="all", top_k=1, mask=masks)
        said = [row.argmax() for row in rows]  # the tokens after the last token and after each guess
        found, branch = said[:1], list[int]()
        while following := [line for line in lines if line[:-1] == branch and guesses[line[-1]] == found[-1]]:
            branch = following[0]
            found.append(said[branch[-1] + 1])
        if branch == [*range(len(branch))]:
            kv.truncate(base + len(branch))
        else:
            kv.keep([(0, base), *(base + number for number in branch)], rebase=False)
        yield found
        text = text + found


@sym.command
def main(arguments: sym.Arguments) -> None:
    arguments.text("text", "the text to continue")
    arguments.whole("--max-tokens", "tokens to generate", 100)
    arguments.whole("--match", "last tokens that must occur earlier", 2)
    arguments.whole("--width", "drafts in the tree", 4, most=16)
    arguments.whole("--length", "tokens of a draft", 8, most=64)
    args = arguments.parse_args()
    end = sym.model_info().eos_ids
    with sym.kv_create() as kv:
        steps = speculate(kv, sym.tokenize(args.text), args.match, args.width, args.length)
        found = islice((token for step in steps for token in step), args.max_tokens)
        answer = list(takewhile(lambda token: token not in end, found))
    sym.send_to_user(f"{args.text}{sym.detokenize(answer)}\n")
    print(f"{len(answer)} tokens in {sym.getrusage().steps} steps", file=sys.stderr)
