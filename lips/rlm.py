"""Recursive language model: the model explores long contexts by its own code, and does not read them.

    symphony run rlm "Which city is the treasure in?" atlas.kv diary.kv

The contexts are KV files of any length and number, computed once (`cat atlas.txt > /kv/.symphony/text/atlas.kv`). The
model sees only their names. Its code reads and searches the contexts on the text view of the mount. With
`ask(name, question)`, it asks the model about a context. `ask` forks the context's file, so only the question is
computed. The code runs in an `Interpreter`, which may read these texts and nothing else. The status is 1 if no answer
comes within --max-turns. (Zhang and Khattab 2025)
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import libsym as sym


def explore(question: str, names: Sequence[str], max_turns: int = 4) -> Iterator[str]:
    """Yield the code of each turn and its output, and last the answer. Without an answer, raise Invalid."""
    view = Path(sym.model_info().mount, ".symphony", "text")
    texts, answers = {name: str(view / name) for name in names}, list[object]()

    def ask(name: str, question: str) -> str:
        """Ask the model about a context, which a KV file already has; return the answer."""
        if name not in names:
            raise ValueError(f"there is no context {name}: there are {', '.join(names)}")
        with sym.kv_fork(name) as kv:
            tokens = sym.tokenize(f"\nQuestion: {question}\nAnswer:", special=False)
            return sym.generate(kv, tokens, stop="\n", max_tokens=48).full_text().strip()

    system = (
        f"You answer by writing Python in ```python blocks. paths = {texts} has the texts: open them, search them. "
        "ask(name, question) asks a reader of one text. Print what you want to see. Call answer(x) when you know."
    )
    chat, asked = sym.Chat(sym.kv_create(), system), question
    with sym.Interpreter({"ask": ask, "answer": answers.append}, read=texts.values()) as python:
        python.run(f"paths = {texts!r}")
        for _ in range(max_turns):
            code, printed = python.ask(chat, asked, max_tokens=200)
            yield code
            yield printed
            if answers:
                yield f"answer: {answers[0]}"
                return
            asked = f"Output:\n{printed[-1000:]}"
    raise sym.Invalid(f"no answer came in {max_turns} turns: give more --max-turns")


@sym.command
def main(arguments: sym.Arguments) -> None:
    arguments.text("question")
    arguments.kv("contexts", "KV files, by their paths on the mount", nargs="+")
    arguments.whole("--max-turns", default=4)
    args = arguments.parse_args()
    for name in args.contexts:
        sym.kv_open(name).close()  # reports a missing or unreadable file before the model starts
    for text in explore(args.question, args.contexts, args.max_turns):
        print(text.rstrip(), end="\n\n")
