"""ReAct: the model thinks, calls a tool, reads the result, and goes on until it has an answer.

    symphony run react "What is 17 * 23?"
    symphony run react "Who wrote the report?" --files . --database people.db

The tools run here, beside the model: a calculator, a search in files, SQL on a database. No option adds another tool:
copy this file, and add a function with a docstring to `tools` in `main`. The result of a tool is appended to the
conversation, whose KV file stays in place. So a call of a tool costs only the tokens of its result; nothing is sent and
prefilled again. A grammar keeps a small model to the form. (Yao et al. 2022)
"""

import ast
import operator
import sqlite3
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path

import libsym as sym

Tool = Callable[[str], str]
OPERATORS: dict[type, Callable[..., float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Mod: operator.mod, ast.USub: operator.neg,
}  # fmt: skip


def calculate(expression: str) -> str:
    """The value of an expression, like calculate[17 * (2 + 3)]."""

    def value(node: ast.expr) -> float:
        match node:
            case ast.Constant(int() | float() as number):
                return number
            case ast.BinOp(left, operation, right) if type(operation) in OPERATORS:
                return OPERATORS[type(operation)](value(left), value(right))
            case ast.UnaryOp(operation, operand) if type(operation) in OPERATORS:
                return OPERATORS[type(operation)](value(operand))
        raise ValueError(f"{ast.unparse(node)} is no arithmetic")

    return f"{value(ast.parse(expression, mode='eval').body):.12g}"


def search(directory: Path) -> Tool:
    def found(words: str) -> str:
        """Lines of files that have all of these words, like search[red car]."""
        lines = [
            f"{path.name}: {line.strip()}"
            for path in sorted(directory.rglob("*.txt")) + sorted(directory.rglob("*.md"))
            for line in path.read_text(errors="replace").splitlines()
            if all(word in line.casefold() for word in words.casefold().split())
        ]
        return "; ".join(lines[:3]) or "nothing found"

    return found


def query(database: Path) -> Tool:
    def rows(statement: str) -> str:
        """The rows that SQL selects, like query[SELECT name FROM sqlite_master]."""
        with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
            connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)  # no ATTACH of other databases
            return str(connection.execute(statement).fetchmany(5))

    return rows


def prompt(tools: Mapping[str, Tool]) -> str:
    known = "\n".join(f"{name}: {tool.__doc__}" for name, tool in tools.items())
    return f"Answer the question. Write a Thought, then an Action, or the Answer. The actions:\n{known}"


def react(chat: sym.Chat, question: str, tools: Mapping[str, Tool], max_calls: int) -> Iterator[str]:
    """Yield the model's lines and the tools' results. After a repeated call or `max_calls` calls, the model must
    answer.
    """
    thought, answer = r"Thought: [^\n]{1,160}\n", r"Answer: [^\n]{1,160}"
    action = rf"(Action: ({'|'.join(tools)})\[[^\n\[\]]{{1,80}}\]|{answer})"
    asked, made, calls_left = question, set[str](), max_calls
    while True:
        form = sym.Grammar.regex(thought + (action if calls_left else answer))
        yield (said := chat.ask(asked, grammar=form).full_text())
        call = said.rpartition("\nAction: ")[2]
        name, _, argument = call.partition("[")
        if name not in tools or not calls_left:
            return
        calls_left -= 1
        if call in made:
            calls_left, result = 0, "you have made this call before"
        else:
            made.add(call)
            try:
                result = tools[name](argument.removesuffix("]"))
            except Exception as error:  # noqa: BLE001 - tools may raise anything, and the model may correct its call
                result = f"{type(error).__name__}: {error}"
        yield (asked := f"Observation: {result}")


@sym.command
def main(arguments: sym.Arguments) -> None:
    arguments.text("question")
    arguments.directory("--files", "texts that may be searched", metavar="DIR")
    arguments.file("--database", "an SQLite database that may be read", metavar="FILE")
    arguments.whole("--max-calls", "of tools", 4, least=0)
    args = arguments.parse_args()
    tools: dict[str, Tool] = {"calculate": calculate}
    if args.files is not None:
        tools["search"] = search(args.files)
    if args.database is not None:
        tools["query"] = query(args.database)
    for line in react(sym.Chat(sym.kv_create(), prompt(tools)), args.question, tools, args.max_calls):
        print(line)
    if "Answer: " not in line:
        sys.exit("react: the model's context is full, and there is no answer")
