"""Context-aware decoding: has the model believe what it has been given to read, not what it remembers.

    symphony run cad --context "In 2030 the capital of France moved to Lyon." "The capital of France is" --strength 1

The question lies in two files, behind the context and alone. Tokens that the context makes likelier get likelier still,
by `strength` times as much again: 0 is plain decoding. (Shi et al. 2023)
"""

from collections.abc import Callable

import libsym as sym


def aware(strength: float) -> Callable[[sym.Dist, sym.Dist], int]:
    """Draws the likeliest token where what the context changes counts once more, `strength` times."""

    def draw(reading: sym.Dist, remembering: sym.Dist) -> int:
        return sym.Dist.mixed([(reading, 1 + strength), (remembering, -strength)]).argmax()

    return draw


def answer(context: str, question: str, strength: float, max_tokens: int) -> sym.Decoding:
    reading, remembering = sym.tokenize(f"{context}\n{question}"), sym.tokenize(question)
    return sym.decode(
        sym.kv_create(), reading, aware(strength), beside=[(sym.kv_create(), remembering)], max_tokens=max_tokens
    )


@sym.command
def main(arguments: sym.Arguments) -> None:
    arguments.text("question", "the text to go on with")
    arguments.text("--context", "what to believe", required=True)
    arguments.number("--strength", default=1.0)
    arguments.whole("--max-tokens", default=16)
    args = arguments.parse_args()
    sym.send_to_user(args.question)
    sym.send_to_user(answer(args.context, args.question, args.strength, args.max_tokens).text(), "\n")
