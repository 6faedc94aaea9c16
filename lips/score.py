"""Scores texts: the perplexity of files, or the likeliest of several endings of a text.

    symphony run score README.md
    symphony run score --after "The capital of France is" " Paris" " Rome" " a dog"

For a file the score is its perplexity, that is e to the mean surprise of a token. A text that is longer than the
context is read in windows. Each window begins half a context before the tokens that it scores. For endings the score is
the log-probability of each ending after the same text, which is computed once. The likeliest ending comes first. The
mean per token is shown, too, since a sum puts long endings at a disadvantage.
"""

import math
from pathlib import Path
from statistics import fmean

import libsym as sym


def surprises(tokens: list[int], context: int) -> list[float]:
    """Return the log-probability of each token except the first."""
    stride, found = max(context // 2, 1), list[float]()
    while len(found) + 1 < len(tokens):
        begin = max(len(found) + 1 + stride - context, 0) if found else 0
        end = len(found) + 1 + stride if found else context
        with sym.kv_create() as kv:
            found += sym.score(kv, tokens[begin:end])[len(found) - begin :]
    return found


def endings(text: str, ends: list[str]) -> list[tuple[float, float, str]]:
    """Return the log-probability of each ending, its mean per token, and the ending; likeliest ending first."""
    found = []
    with sym.kv_create() as kv:
        kv.write(given := sym.tokenize(text))
        for end in ends:
            whole = sym.tokenize(text + end)  # tokens may join across the end of `text`
            same = next((i for i, (a, b) in enumerate(zip(given, whole, strict=False)) if a != b), len(given))
            if not same:
                raise sym.Invalid(f"{end!r} changes the first token of the text, and none precedes it: give more text")
            with kv.fork() as fork:
                fork.truncate(same - 1)
                logprobs = sym.score(fork, whole[same - 1 :])
            found.append((math.fsum(logprobs), fmean(logprobs), end))
    return sorted(found, reverse=True)


@sym.command
def main(arguments: sym.Arguments) -> None:
    arguments.text("texts", "files; with --after endings", nargs="+")
    arguments.text("--after", "rank endings of this text", metavar="TEXT")
    arguments.whole("--context", "tokens of a file in one window (default: the model's whole context)", least=2)
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
