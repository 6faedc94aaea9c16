"""Reflexion: the model writes code, reads why its test failed, says what was wrong, and tries again.

    symphony run reflexion "a function double(x) that gives twice x" --test "assert double(4) == 8"

The test is Python code that runs, confined, after the model's code. The conversation is one KV file, and keeps the
errors and the model's conclusions. So a new attempt costs only its own tokens. (Shinn et al. 2023)
"""

from collections.abc import Iterator

import libsym as sym


def attempts(chat: sym.Chat, task: str, test: str, most: int, max_tokens: int = 160) -> Iterator[tuple[str, str]]:
    """Yield each attempt's code and its error (empty if the test passed). Stop at success or after `most` attempts."""
    asked = f"Write Python: {task}. Write the code alone."
    for number in range(1, most + 1):
        with sym.Interpreter() as python:  # a new interpreter, without the definitions of earlier attempts
            code, wrong = python.ask(chat, asked, max_tokens=max_tokens)
            if python.raised is None:
                wrong = python.run(test)
        if python.raised is None:
            yield code, ""
            return
        yield code, python.raised
        if number < most:
            chat.ask(f"The test failed: {wrong[-300:]} What was wrong, in one sentence?", max_tokens=48).full_text()
            asked = "Write the code again, without that mistake."


@sym.command
def main(arguments: sym.Arguments) -> None:
    arguments.text("task", "a description of the code")
    arguments.text("--test", "Python that fails where the code is wrong", required=True)
    arguments.whole("--attempts", "limit of attempts", 3)
    args = arguments.parse_args()
    chat, wrong = sym.Chat(sym.kv_create(), "You are a careful programmer."), ""
    for code, wrong in attempts(chat, args.task, args.test, args.attempts):
        print(code, f"# {wrong or 'passed'}", sep="\n", end="\n\n")
    if wrong:
        arguments.exit(1, f"reflexion: no attempt of {args.attempts} has passed\n")
