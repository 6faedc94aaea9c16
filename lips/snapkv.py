"""SnapKV: keeps only those entries of a long prompt that its last tokens attend to.

    symphony run snapkv "What is the file system of Symphony? It is" --context README.md --budget 256
    symphony run snapkv "Programs call" --context README.md --compare " the model" --budget 1024

The prompt is read once, as a whole. Its last tokens are mostly a question; their attention to the earlier entries shows
which entries the answer will need. The program keeps these --budget entries, and generates the answer on them. Each
entry counts as much as its most attended neighbour, since neighbours belong together. In the paper each head chooses
its own entries. An entry of a KV file belongs to all heads, so here the sum over all heads decides. (Li et al. 2024)
"""

import numpy as np

import libsym as sym

WINDOW = 16  # the last tokens of the prompt, whose attention decides; their entries stay
NEIGHBOURS = 3  # neighbours of an entry, on each side


def compress(kv: sym.KV, tokens: list[int], budget: int) -> None:
    """Append a prompt to an empty file, and keep `budget` of its entries."""
    if len(tokens) <= budget:
        kv.write(tokens)
        return
    kv.write(tokens[:-WINDOW])
    seen = sym.pred(kv, tokens[-WINDOW:], top_k=1, attention="entries").attention
    mass = np.pad(np.asarray(seen)[:-WINDOW], NEIGHBOURS)
    pooled = np.lib.stride_tricks.sliding_window_view(mass, 2 * NEIGHBOURS + 1).max(axis=1)
    kept = np.sort(np.argsort(-pooled, kind="stable")[: budget - WINDOW])
    kv.keep([*kept.tolist(), (-WINDOW, None)], rebase=False)


@sym.command
def main(arguments: sym.Arguments) -> None:
    arguments.text("prompt", "the text to go on with")
    arguments.document("--context", "a text that comes before it", metavar="FILE")
    arguments.whole("--budget", "entries of the prompt to keep", 128, least=2 * WINDOW)
    arguments.whole("--max-tokens", default=64)
    arguments.text("--compare", "print perplexities of this continuation instead", metavar="TEXT")
    args = arguments.parse_args()
    context = args.context.text + "\n\n" if args.context else ""
    kv, prompt = sym.kv_create(), sym.tokenize(context + args.prompt)
    compress(kv, prompt[:-1], args.budget)
    if args.compare:
        full, judged = sym.kv_create(), prompt[-1:] + sym.tokenize(args.compare)
        compress(full, prompt[:-1], len(prompt))
        for each in (full, kv):
            print(f"{each.len()} entries: perplexity {sym.perplexity(sym.score(each, judged)):.2f}")
    else:
        sym.send_to_user(sym.generate(kv, prompt[-1:], max_tokens=args.max_tokens).text(), "\n")
