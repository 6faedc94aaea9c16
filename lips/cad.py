"""Context-aware decoding: makes the model trust the given context more than its memory.

    symphony run cad --context "In 2030 the capital of France moved to Lyon." "The capital of France is" --strength 1

Two files hold the question: one after the context, the other alone. The effect of the context on the logits is added
`strength` more times; 0 is plain decoding. (Shi et al. 2023)
"""

from functools import partial

import libsym as sym


def aware(reading: sym.Dist, remembering: sym.Dist, strength: float) -> int:
    """Return the likeliest token after the effect of the context is added `strength` more times."""
    return sym.Dist.mixed([(reading, 1 + strength), (remembering, -strength)]).argmax()


def answer(context: str, question: str, strength: float, max_tokens: int) -> sym.Decoding:
    reading, alone = sym.tokenize(f"{context}\n{question}"), [(sym.kv_create(), sym.tokenize(question))]
    draw = partial(aware, strength=strength)
    return sym.decode(sym.kv_create(), reading, draw, beside=alone, max_tokens=max_tokens)


@sym.command
def main(arguments: sym.Arguments) -> None:
    arguments.text("question", "the text to go on with")
    arguments.text("--context", "what to believe", required=True)
    arguments.number("--strength", default=1.0)
    arguments.whole("--max-tokens", default=16)
    args = arguments.parse_args()
    answered = answer(args.context, args.question, args.strength, args.max_tokens)
    sym.send_to_user(args.question, answered.text(), "\n")
