"""Classifier-free guidance: makes the model follow its instructions more closely than usual.

    symphony run cfg "Describe a cat." --system "You speak like a pirate." --scale 3

Two files hold the same question, one with the instructions and one without (or with the opposite: --negative). Each
drawn token is appended to both files. The difference that the instructions make to the logits counts `scale` times: 1
is plain decoding, 0 ignores the instructions. (Sanchez et al. 2023)
"""

from functools import partial

import libsym as sym


def guided(with_: sym.Dist, without: sym.Dist, scale: float) -> int:
    """Return the likeliest token when the effect of the instructions counts `scale` times."""
    return sym.Dist.mixed([(with_, scale), (without, 1 - scale)]).argmax()


def answer(question: str, system: str, negative: str | None, scale: float, max_tokens: int) -> sym.Decoding:
    asked = {"role": "user", "content": question}
    tokens = sym.chat_tokens([{"role": "system", "content": system}, asked])
    plain = sym.chat_tokens([asked] if negative is None else [{"role": "system", "content": negative}, asked])
    draw, beside = partial(guided, scale=scale), [(sym.kv_create(), plain)]
    return sym.decode(sym.kv_create(), tokens, draw, beside=beside, max_tokens=max_tokens)


@sym.command
def main(arguments: sym.Arguments) -> None:
    arguments.text("question")
    arguments.text("--system", "the instructions to follow", required=True)
    arguments.text("--negative", "instructions to keep away from, in place of none")
    arguments.number("--scale", "of the guidance", 2.0)
    arguments.whole("--max-tokens", default=64)
    args = arguments.parse_args()
    sym.send_to_user(answer(args.question, args.system, args.negative, args.scale, args.max_tokens).text(), "\n")
