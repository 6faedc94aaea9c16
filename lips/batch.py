"""Answers a file of prompts, JSON lines in and out; a new run continues where the last run ended.

    symphony run --bind . batch prompts.jsonl answers.jsonl --streams 16
    symphony run batch prompts.jsonl /kv/answers.jsonl         # plain files lie on the mount, too

A line is {"prompt": "…"} or {"messages": […]}. A line may also have "id" (default: the number of the line),
"max_tokens", "temperature" and "seed". An answer is {"id", "text", "finish"}, or {"id", "error"} if the prompt cannot
be answered. Each answer is written when it is complete, with one write. A run after kill -9 cuts off the partial last
line, and asks only the prompts without an answer.
"""

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import anyio

import libsym as sym

FIELDS = ("id", "prompt", "messages", "max_tokens", "temperature", "seed")


def objects(file: BinaryIO, name: Path | str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a file of JSON lines, each with its place: the name of the file and the line."""
    for number, line in enumerate(file, 1):
        where = f"{name}, line {number}"
        try:
            found = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError) as error:
            raise sym.Invalid(f"{where}: no JSON: {error}") from None
        if isinstance(found, dict):
            yield where, {"id": number, **found}
        elif line.strip():
            raise sym.Invalid(f"{where}: give an object, one of {', '.join(FIELDS)} or more in it")


def asked(file: BinaryIO, name: Path, answered: set[str]) -> Iterator[dict[str, Any]]:
    """Yield the prompts that have no answer yet. Raise Invalid, with the place, at a line that is not a prompt."""
    known = dict[str, str]()
    for number, (where, found) in enumerate(objects(file, name)):
        if ("prompt" in found) == ("messages" in found) or not found.keys() <= {*FIELDS}:
            raise sym.Invalid(f"{where}: give either prompt or messages; its fields can be {', '.join(FIELDS)}")
        if (first := known.setdefault(given := json.dumps(found["id"]), where)) != where:
            raise sym.Invalid(f"{where}: its id {given} is that of {first}")
        if given not in answered:
            yield {"seed": number, **found}


def answered(file: BinaryIO, name: str) -> set[str]:
    """Return the ids of the answered prompts, as JSON. Cut off the partial line that a killed run has left."""
    file.seek(0)
    left = (text := file.read())[text.rfind(b"\n") + 1 :]
    if not b'{"id": '.startswith(left[:7]):
        raise sym.Invalid(f"{name}: its last line is no answer, nor half of one: the file stays as it is")
    file.truncate(len(text) - len(left))
    file.seek(0)
    return {json.dumps(found["id"]) for _, found in objects(file, name)}


async def answer(line: dict[str, Any], max_tokens: int, temperature: float) -> dict[str, Any]:
    """Return the answer to one line."""
    try:
        sampler = sym.Sampler(temperature=line.get("temperature", temperature), seed=line["seed"])
        if "messages" in line:
            tokens = await sym.aio.chat_tokens(line["messages"])
        else:
            tokens = await sym.aio.tokenize(line["prompt"])
        async with await sym.aio.kv_create() as kv:
            found = await sym.aio.generate(kv, tokens, sampler=sampler, max_tokens=line.get("max_tokens", max_tokens))
            return {"id": line["id"], "text": await found.full_text(), "finish": found.finish}
    except (sym.Invalid, sym.TooLarge) as error:
        return {"id": line["id"], "error": str(error)}


async def answer_all(lines: Iterator[dict[str, Any]], out: BinaryIO, streams: int, **how: Any) -> int:
    """Write the answers, up to `streams` in flight at a time; return the number of errors."""
    num_errors = 0

    async def stream() -> None:
        nonlocal num_errors
        for line in lines:  # all streams share one iterator
            found = await answer(line, **how)
            num_errors += "error" in found
            os.write(out.fileno(), json.dumps(found, ensure_ascii=False).encode(errors="backslashreplace") + b"\n")

    async with anyio.create_task_group() as tasks:
        for _ in range(streams):
            tasks.start_soon(stream)
    return num_errors


@sym.command
def main(arguments: sym.Arguments) -> None:
    arguments.file("prompts", "a file with a line of JSON for each prompt")
    arguments.text("answers", "the file that answers are appended to")
    arguments.whole("--streams", "answers under way at the same time", 8, most=256)
    arguments.whole("--max-tokens", "of an answer", 256)
    arguments.number("--temperature", "0 takes the likeliest token", 0.0, least=0)
    args = arguments.parse_args()
    with args.prompts.open("rb") as prompts, Path(args.answers).open("a+b", buffering=0) as out:
        if os.path.sameopenfile(prompts.fileno(), out.fileno()):
            raise sym.Invalid(f"{args.answers} has the prompts: give another file for the answers")
        try:
            fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise sym.WouldBlock(f"{args.answers}: another run appends to it", errno.EAGAIN) from None
        lines = asked(prompts, args.prompts, answered(out, args.answers))
        how = partial(answer_all, max_tokens=args.max_tokens, temperature=args.temperature)
        if num_errors := anyio.run(how, lines, out, args.streams):
            raise sym.Invalid(f"answers that are errors, of this run: {num_errors} (see {args.answers})")
