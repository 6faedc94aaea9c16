"""Contrastive decoding: prefers tokens that an expert finds likelier than an amateur does.

    symphony run contrastive "The history of the city begins" --window 4 --max-tokens 48

Tokens that a weak model is also sure of are mostly dull or repeated. So the score of a token is its log-probability by
the expert, plus --beta times the difference to its log-probability by the amateur. --beta 0 is plain decoding. Only
plausible tokens count: those at least --alpha times as likely as the expert's likeliest token. One daemon serves one
model, so the amateur here is the same model with only the last --window tokens. (Li et al. 2022; beta is from O'Brien
and Lewis, 2023)
"""

import math
from functools import partial

import libsym as sym


def plausible(expert: sym.Dist, alpha: float) -> list[int]:
    """Return the tokens that are at least `alpha` times as likely as the likeliest token."""
    first = expert.topk(1).logprobs[0]
    share = max(alpha * math.exp(first), 1 / expert.vocab_size)  # at most 1 / share tokens are so likely
    likeliest = expert.topk(math.ceil(1 / share))
    return [token for token, logprob in likeliest if math.exp(logprob - first) >= alpha]


def contrast(expert: sym.Dist, amateur: sym.Dist, alpha: float, beta: float) -> int:
    """Return the plausible token with the highest contrastive score."""
    return sym.Dist.mixed([(expert, 1 + beta), (amateur, -beta)]).argmax(allowed=plausible(expert, alpha))


def decode(prompt: list[int], window: int, alpha: float, beta: float, max_tokens: int) -> list[int]:
    """Return the continuation of the prompt. After each `window` tokens the amateur begins a new file."""
    expert, found, pending = sym.kv_create(), list[int](), prompt
    draw = partial(contrast, alpha=alpha, beta=beta)
    while len(found) < max_tokens:
        memory = (prompt + found)[-window:]
        with sym.kv_create() as amateur:
            rest = min(window, max_tokens - len(found))
            part = sym.decode(expert, pending, draw, beside=[(amateur, memory)], max_tokens=rest)
            found += list(part)
        if part.finish == "stop_token" or not expert.room():
            break
        pending = part.pending
    return found


@sym.command
def main(arguments: sym.Arguments) -> None:
    arguments.text("prompt", "the text to go on with")
    arguments.whole("--window", "tokens the amateur remembers", 4)
    arguments.number("--alpha", "how plausible a token must be", 0.1, least=0, most=1)
    arguments.number("--beta", "how much the contrast counts", 1.0)
    arguments.whole("--max-tokens", default=48)
    args = arguments.parse_args()
    found = decode(sym.tokenize(args.prompt), args.window, args.alpha, args.beta, args.max_tokens)
    print(args.prompt + sym.detokenize(found))
