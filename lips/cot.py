"""Chain-of-thought decoding: tries the likeliest first tokens, and takes the surest answer.

    symphony run cot "Tom has 3 apples and buys 2. How many has he?" --paths 8
    symphony run cot "Was Caesar born before Plato?" --all

Greedy decoding often answers immediately, and wrongly. A path that begins with another token may reason first. So the
question is computed once and forked for each of the likeliest first tokens. Each fork decodes greedily, and then states
its answer in a few words. The sureness of an answer is the mean gap in probability between the likeliest and the second
likeliest token of these words. Equal answers add up their sureness. No prompt asks for steps. (Wang, Zhou 2024)
"""

import math
from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean

import libsym as sym


@dataclass(frozen=True, slots=True)
class Path:
    """A chain of thought. `sureness` is the mean gap in probability between the answer's tokens and the runners-up."""

    text: str
    answer: str
    sureness: float


def decode(kv: sym.KV, question: list[int], num_paths: int, max_tokens: int) -> list[Path]:
    """Append the question to `kv`; return the paths after it. The path with the likeliest first token comes first."""
    firsts = sym.pred(kv, question, top_k=num_paths).topk(num_paths)
    forks = kv.fork_n(len(firsts))
    ways = [sym.generate(fork, [token], max_tokens=max_tokens) for fork, (token, _) in zip(forks, firsts, strict=True)]
    texts = [sym.detokenize([token]) + way.full_text() for (token, _), way in zip(firsts, ways, strict=True)]
    answers = [ended(*each) for each in zip(forks, ways, strict=True)]  # all answers start before the first is read
    return [Path(text, *said(answer)) for text, answer in zip(texts, answers, strict=True)]


def ended(kv: sym.KV, way: sym.Generation) -> sym.Generation | None:
    """Start the answer of a path. Return None if the context has no room to ask for it."""
    tokens = way.pending + sym.tokenize("\nSo the answer is")
    if kv.room() < len(tokens):
        return None
    return sym.generate(kv, tokens, max_tokens=12, stop=[".", "\n"], logprobs=2)


def said(answer: sym.Generation | None) -> tuple[str, float]:
    """Return the words of an answer and their sureness."""
    if answer is None or not (words := answer.full_text().strip(" :")):
        return "", 0.0
    dists = answer.dists[:-1] if answer.finish == "stop_text" else answer.dists
    tops = [dist.topk(2) for dist in dists if dist is not None]
    gaps = [math.exp(first) - math.exp(second) for (_, first), (_, second) in tops]
    return words, fmean(gaps) if gaps else 0.0


def ranked(paths: list[Path]) -> list[tuple[float, str]]:
    """Return the answers with the summed sureness of their paths, the surest first."""
    sums = defaultdict[str, float](float)
    for path in paths:
        sums[path.answer] += path.sureness
    return sorted(((total, answer) for answer, total in sums.items() if answer), reverse=True)


@sym.command
def main(arguments: sym.Arguments) -> None:
    arguments.text("question")
    arguments.whole("--paths", "first tokens that are tried", 8, most=64)
    arguments.whole("--max-tokens", "of each path before its answer", 60)
    arguments.add_argument("--all", action="store_true", help="show all paths and how sure they are")
    args = arguments.parse_args()
    question = sym.chat_tokens([{"role": "user", "content": args.question}])
    with sym.kv_create() as kv:
        paths = decode(kv, question, args.paths, args.max_tokens)
    if args.all:
        for path in paths:
            sym.send_to_user(f"[{path.sureness:.3f}] {path.text.strip()!r} → {path.answer!r}\n")
    answers = ranked(paths)
    if not answers:
        raise sym.Invalid("no path says an answer: give more --paths or --max-tokens, or a shorter question")
    for total, answer in answers if args.all else answers[:1]:
        sym.send_to_user(f"{total:.3f}  {answer}\n" if args.all else f"{answer}\n")
