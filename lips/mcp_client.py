"""An MCP client: the model calls the tools of a server that speaks the Model Context Protocol.

    symphony run mcp_client "What is the weather in Rome?" -- python3 weather_server.py

The server is a process that speaks MCP on its standard input and output; this program starts it. The JSON schemas of
its tools become a grammar: the model can only name a tool that exists, with arguments that fit its schema. The result
of a tool is appended to the conversation. The program needs the package mcp (`symphony-os[programs]`).
"""

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import libsym as sym

try:
    from mcp import Client, MCPError, StdioServerParameters
    from mcp.types import TextContent, Tool
except ModuleNotFoundError:
    raise SystemExit("mcp_client needs the package mcp: pip install 'symphony-os[programs]'") from None

MAX_TOKENS = 256  # maximum for a call or an answer


def form(tools: Sequence[Tool]) -> sym.Grammar:
    """Return a grammar of JSON that calls a tool or answers. Without tools, the grammar only allows an answer."""
    calls: list[dict[str, Any]] = [
        {"tool": {"const": tool.name}, "arguments": {"additionalProperties": False, **tool.input_schema}}
        for tool in tools
    ]
    either = [*calls, {"answer": {"type": "string", "maxLength": 200}}]
    objects = [
        {"type": "object", "properties": each, "required": [*each], "additionalProperties": False} for each in either
    ]
    return sym.Grammar.json({"anyOf": objects}, compact=True)


async def converse(client: Client, question: str, max_calls: int) -> AsyncIterator[str]:
    """Yield the model's calls, the results of the tools, and last the answer."""
    tools = (await client.list_tools()).tools
    known = "\n".join(f"{tool.name}: {tool.description} {json.dumps(tool.input_schema)}" for tool in tools)
    system = f'Answer with {{"tool": ..., "arguments": ...}} or {{"answer": ...}}. The tools:\n{known}'
    async with sym.aio.Chat(await sym.aio.kv_create(), system) as chat:
        asked, role = question, "user"
        for calls_left in range(max_calls, -1, -1):
            grammar = form(tools if calls_left else [])
            answer = await chat.ask(asked, role=role, grammar=grammar, max_tokens=MAX_TOKENS)
            yield (text := await answer.full_text())
            if answer.finish == "length":
                raise sym.Invalid(f"the model has said {len(answer.tokens)} tokens, and is not done: {text[:80]}")
            said = json.loads(text)
            if "tool" not in said:
                return
            result = await client.call_tool(said["tool"], said["arguments"])
            asked, role = " ".join(part.text for part in result.content if isinstance(part, TextContent)), "tool"
            yield asked


@sym.command
async def main(arguments: sym.Arguments) -> None:
    arguments.text("question")
    arguments.text("server", "the command of the MCP server, behind --", nargs="+")
    arguments.whole("--max-calls", "of tools", 3, least=0)
    args = arguments.parse_args()
    try:
        async with Client(StdioServerParameters(command=args.server[0], args=args.server[1:])) as client:
            async for line in converse(client, args.question, args.max_calls):
                print(line)
    except* MCPError as errors:
        first: BaseException = errors  # groups may nest, one level for each task group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise ConnectionError(f"the server {args.server[0]}: {first}") from None
