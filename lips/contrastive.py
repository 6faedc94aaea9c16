"""Contrastive decoding: prefers what an expert says, and an amateur does not.

    symphony run contrastive "The history of the city begins" --window 4 --max-tokens 48

What a weak model is sure of, too, is mostly the dull and the repeated. So a token is judged by how likely a strong one
finds it, and --beta times by how much likelier than the weak one: 0 is plain decoding. Only what the strong one finds
plausible counts, which is at least --alpha times as likely as its first. One daemon serves one model: the amateur is
the same model, but it has read the last --window tokens alone. (Li et al. 2022; beta is O'Brien and Lewis's, 2023)
"""

import math
from functools import partial

import libsym as sym


def plausible(expert: sym.Dist, alpha: float) -> list[int]:
    """The tokens at least `alpha` times as likely as the first."""
    first = expert.topk(1).logprobs[0]
    share = max(alpha * math.exp(first), 1 / expert.vocab_size)  # of each, so no more than 1 / share are plausible
    likeliest = expert.topk(math.ceil(1 / share))
    return [token for token, logprob in likeliest if math.exp(logprob - first) >= alpha]


def contrast(expert: sym.Dist, amateur: sym.Dist, alpha: float, beta: float) -> int:
    """Draws the plausible token that the expert prefers most, by itself and beside the amateur."""
    return sym.Dist.mixed([(expert, 1 + beta), (amateur, -beta)]).argmax(allowed=plausible(expert, alpha))


def decode(prompt: list[int], window: int, alpha: float, beta: float, max_tokens: int) -> list[int]:
    """Goes on with the prompt. The amateur's file is begun anew when it has read twice the window."""
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
