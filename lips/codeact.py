"""CodeAct: the model acts by writing Python, which runs confined, and reads the output.

    symphony run codeact "How many primes are below 100?"
    symphony run codeact "Which line of the log has the error?" --read log.txt

The code runs in an `Interpreter`: a process that the kernel confines. The code can't use the network, start processes,
or write files. The code's variables stay from turn to turn, and the conversation stays in its KV file. The model calls
`answer(x)` when it knows the answer. The status is 1 if --max-turns turns bring no answer. (Wang et al. 2024)
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import libsym as sym

SYSTEM = "You answer by writing Python in ```python blocks. Print what you want to see. Call answer(x) when you know."


def act(
    chat: sym.Chat, question: str, read: Iterable[Path] = (), max_turns: int = 4, seconds: float = 5.0, **functions: Any
) -> Iterator[str]:
    """Yield the model's code and its output, turn by turn, and last the answer. Without an answer, raise Invalid.

    `functions` are tools of this program that the code may call.
    """
    answers = list[object]()
    with sym.Interpreter({**functions, "answer": answers.append}, read=read, seconds=seconds) as python:
        asked = question
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
    arguments.file("--read", "a file that the code may read; may come again", action="append", metavar="PATH")
    arguments.whole("--max-turns", default=4)
    args = arguments.parse_args()
    read = args.read or []
    files = f" You may open: {', '.join(str(path.resolve()) for path in read)}." if read else ""
    for text in act(sym.Chat(sym.kv_create(), SYSTEM + files), args.question, read, args.max_turns):
        print(text.rstrip(), end="\n\n")
