"""Skeleton of thought: writes an outline first, and then all of its points side by side.

    symphony run skeleton_of_thought "How do I plant a tree?" --points 3

A long answer is a chain of steps, one for each token. Here the chain is only as long as the outline and the longest
point together. The points are written on forks of the file with question and outline, and share the steps of the
daemon. (Ning et al. 2023)
"""

from collections.abc import Iterator

import libsym as sym


def answer(kv: sym.KV, question: str, num_points: int, max_tokens: int) -> Iterator[tuple[str, str]]:
    """Yield each point of the outline with its explanation."""
    chat = sym.Chat(kv, "You answer briefly.")
    form = "\n".join(rf"{number}\. [A-Z][^\n.]{{4,40}}" for number in range(1, num_points + 1))
    outline = f"{question} Answer with an outline of {num_points} short points."
    points = chat.ask(outline, grammar=sym.Grammar.regex(form)).full_text().splitlines()
    sentence = sym.Grammar.regex(r"[A-Z][^\n.!?]{20,200}\.")
    asked = [f"Explain in one sentence: {point[3:]}" for point in points]
    texts = [chat.fork().ask(each, grammar=sentence, max_tokens=max_tokens) for each in asked]
    for point, text in zip(points, texts, strict=True):
        yield point, text.full_text().strip()


@sym.command
def main(arguments: sym.Arguments) -> None:
    arguments.text("question")
    arguments.whole("--points", "of the outline", 3, most=20)
    arguments.whole("--max-tokens", "about each point", 60)
    args = arguments.parse_args()
    for point, text in answer(sym.kv_create(), args.question, args.points, args.max_tokens):
        print(f"{point}\n   {text}")
