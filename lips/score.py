"""Scores texts: the perplexity of files, or which of some endings a text has most likely.

    symphony run score README.md
    symphony run score --after "The capital of France is" " Paris" " Rome" " a dog"

Of a file: perplexity, that is e to the mean surprise of a token. A text that is longer than the context is read in
windows, each of which begins half a context earlier than what it scores. Of endings: the log-probability of each after
the same text, which is computed once, the likeliest first; and the mean of its tokens, where long endings lose nothing.
"""

import math
from pathlib import Path
from statistics import fmean

import libsym as sym


def surprises(tokens: list[int], context: int) -> list[float]:
    """Return the log-probability of each token but the first."""
    stride, found = max(context // 2, 1), list[float]()
    while len(found) + 1 < len(tokens):
        begin = max(len(found) + 1 + stride - context, 0) if found else 0
        end = len(found) + 1 + stride if found else context
        with sym.kv_create() as kv:
            found += sym.score(kv, tokens[begin:end])[len(found) - begin :]
    return found


def endings(text: str, ends: list[str]) -> list[tuple[float, float, str]]:
    """Return the log-probability of each ending after the text, with its mean a token, the likeliest first."""
    found = []
    with sym.kv_create() as kv:
        kv.write(given := sym.tokenize(text))
        for end in ends:
            whole = sym.tokenize(text + end)  # whose first tokens may differ from the text's: they join at the seam
            same = next((i for i, (a, b) in enumerate(zip(given, whole, strict=False)) if a != b), len(given))
            if not same:
                raise sym.Invalid(f"{end!r} joins the first token of the text, which depends on none: give more text")
            with kv.fork() as fork:
                fork.truncate(same - 1)
                logprobs = sym.score(fork, whole[same - 1 :])
            found.append((math.fsum(logprobs), fmean(logprobs), end))
    return sorted(found, reverse=True)


@sym.command
def main(arguments: sym.Arguments) -> None:
    arguments.text("texts", "files; with --after endings", nargs="+")
    arguments.text("--after", "rank endings of this text", metavar="TEXT")
    arguments.whole("--context", "tokens that are read at once of a file (default: all that the model takes)", least=2)
    args = arguments.parse_args()
    if args.after is not None:
        for total, mean, end in endings(args.after, args.texts):
            sym.send_to_user(f"{total:9.3f}  {mean:8.3f} a token  {end!r}\n")
        return
    most = sym.model_info().max_positions
    for path in map(Path, args.texts):
        tokens = sym.tokenize(path.read_text(encoding="utf-8", errors="replace"))
        if len(tokens) < 2:
            raise sym.Invalid(f"{path}: a text of one token or none has no perplexity")
        logprobs = surprises(tokens, min(args.context or most, most))
        sym.send_to_user(f"{sym.perplexity(logprobs):9.3f}  {len(tokens)} tokens  {path}\n")
