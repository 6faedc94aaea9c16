"""Asynchronous tools: the model keeps writing while a tool runs, and reads the result when it comes.

    symphony run async_tools "Tell me about the sea." --files docs

First the model chooses the word to search for; a grammar fixes the form of this call. The search begins, and the model
keeps writing. When the result arrives, the program cancels the generation, which stops within a step. Then the program
appends the result and starts a new generation. The KV file stays in place, so an interruption costs only the tokens of
the result.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import anyio

import libsym as sym

Tool = Callable[[str], Awaitable[str]]
Show = Callable[[str], object]


async def write(kv: sym.KV, question: str, tool: Tool, show: Show, max_tokens: int) -> None:
    """Show the call of the tool, the text that the model writes meanwhile, the tool's result, and the text after it."""
    tokens = await sym.aio.chat_tokens([{"role": "user", "content": question}])
    call = await sym.aio.generate(kv, tokens, grammar=sym.Grammar.regex(r"<<search: [a-z]{2,20}>>\n"), max_tokens=32)
    words = await call.full_text()
    show(words)
    pending = call.pending
    results = list[str]()
    generation = await sym.aio.generate(kv, pending, max_tokens=max_tokens)

    async def run() -> None:
        results.append(await tool(words[10:-3]))
        generation.cancel()  # stops within a step; the tokens so far stay

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        async for piece in generation.text():
            show(piece)
    result = f"\n<<result: {results[0]}>>\n"
    show(result)
    tokens = generation.pending + await sym.aio.tokenize(result, special=False)
    async for piece in (await sym.aio.generate(kv, tokens, max_tokens=max_tokens)).text():
        show(piece)


def search(directory: Path, word: str) -> str:
    found = (
        line.strip()
        for path in sorted(directory.rglob("*.txt")) + sorted(directory.rglob("*.md"))
        for line in path.read_text(errors="replace").splitlines()
        if word in line.casefold()
    )
    return next(found, "nothing found")


@sym.command
async def main(arguments: sym.Arguments) -> None:
    arguments.text("question")
    arguments.directory("--files", "texts to search (default: here)", Path(), metavar="DIR")
    arguments.whole("--max-tokens", "before and after the result", 64)
    args = arguments.parse_args()
    tool = partial(anyio.to_thread.run_sync, partial(search, args.files))
    await write(await sym.aio.kv_create(), args.question, tool, sym.send_to_user, args.max_tokens)
    sym.send_to_user("\n")
