"""Messages as a model was trained to see them: read from a request, given to its template, with tools if need be."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import libsym as sym
from lips.gateway.errors import ApiError
from lips.gateway.fields import Fields, parse_inner

Message = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TOLD = """You may call functions to help with the user's request. These are their signatures, between <tools> tags:
<tools>
{tools}
</tools>
For each call give a JSON object with the function's name and arguments between <tool_call> tags:
<tool_call>
{{"name": "<name>", "arguments": {{"<parameter>": <value>}}}}
</tool_call>"""


_MOST_TOKENS = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Input of a model: the tokens of a whole conversation, or a turn that goes on with one."""

    tokens: Sequence[int] = ()
    turn: Sequence[Message] | None = None
    tools: Sequence[Any] | None = None
    begin: str = ""
    """The answer begins so: it is given, and goes on."""


def messages_of(fields: Fields, name: str = "messages") -> list[Message]:
    """The messages of a request in OpenAI's form; content is text in each."""
    fields.required(name)
    found = [_message(each) for each in fields.children(name)]
    if not found:
        raise ApiError(400, f"{name} is empty: a message at least is expected", param=name)
    return found


def _message(fields: Fields) -> Message:
    fields.required("role")
    role = fields.one_of("role", ROLES, "")
    message: Message = {"role": {"developer": "system", "function": "tool"}.get(role, role)}
    refusal = fields.text("refusal", "") or ""
    message["content"] = _content(fields) or refusal
    if calls := [_call(each) for each in fields.children("tool_calls")]:
        message["tool_calls"] = calls
    elif role not in {"assistant", "tool"}:
        fields.required("content")
    for each in ("name", "tool_call_id"):
        if (value := fields.text(each)) is not None:
            message[each] = value
    return message


def _content(fields: Fields) -> str:
    """A text, or the texts of a list of parts. A model of text takes nothing else."""
    if isinstance(fields.body.get("content"), str) or not fields.has("content"):
        return fields.text("content", "") or ""
    texts = []
    for part in fields.children("content"):
        kind = part.text("type", "text")
        if kind not in {"text", "input_text", "output_text", "refusal"}:
            where = part.name_of("type")
            raise ApiError(400, f"{where} is {kind!r}: this model takes text", param=where, code="unsupported_content")
        texts.append(part.text("text", part.text("refusal", "")) or "")
    return "\n".join(texts)


def _call(fields: Fields) -> dict[str, Any]:
    """An earlier call of the model; its arguments as an object, which is how templates want them."""
    function = fields.child("function")
    if function is None:
        raise ApiError(400, f"{fields.name_of('function')} is missing", param=fields.name_of("function"))
    name, text = function.name("name"), function.text("arguments", "{}") or "{}"
    try:
        arguments = parse_inner(text)
    except ValueError:
        arguments = text
    return {"id": fields.text("id", ""), "type": "function", "function": {"name": name, "arguments": arguments}}


class Prompts:
    """Of the model that is served."""

    def __init__(self, model: str) -> None:
        self.model = model
        self._knows_tools: bool | None = None
        self._marks: tuple[list[tuple[str, str]], list[tuple[str, str]]] | None = None

    async def tokens(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        """The prompt of a whole conversation."""
        turns, told = await self.turns(messages, tools)
        return await sym.aio.chat_tokens(turns, told, variables=variables)

    async def prompt(
        self, fields: Fields, messages: Sequence[Message], tools: Sequence[Any] | None, *, is_turn: bool, room: int
    ) -> Prompt:
        """The prompt of messages, as the fields of their request want it. `room`: the most tokens it may have.

        `is_turn`: the messages go on with a conversation.
        """
        turns, told = await self.turns(messages, tools)
        variables, opens, begin = variables_of(fields), fields.flag("add_generation_prompt", True), ""
        if fields.flag("continue_final_message"):
            if fields.flag("add_generation_prompt"):
                raise ApiError(400, "continue_final_message goes with no new answer", param="add_generation_prompt")
            if not turns or turns[-1]["role"] != "assistant" or "tool_calls" in turns[-1]:
                raise ApiError(400, "continue_final_message: the last message is not an answer", param="messages")
            begin, opens = turns.pop()["content"], True
        if is_turn:
            for name in ("truncate_prompt_tokens", "chat_template_kwargs"):
                if fields.has(name):
                    raise ApiError(400, f"{name}: a conversation has its tokens already", param=name)
            if not opens:
                raise ApiError(400, "add_generation_prompt: a turn has an answer", param="add_generation_prompt")
            return Prompt(turn=turns, tools=told, begin=begin)
        tokens = await sym.aio.chat_tokens(turns, told, add_generation_prompt=opens, variables=variables)
        if begin:
            tokens += await sym.aio.tokenize(begin, special=False)
        return Prompt(tokens=truncated(fields, tokens, room), tools=told)

    async def turns(
        self, messages: Sequence[Message], tools: Sequence[Any] | None
    ) -> tuple[list[Message], Sequence[Any] | None]:
        """Messages and tools as the template takes them. One that knows no tools has them in the system's message."""
        has_calls = any("tool_calls" in each or each["role"] == "tool" for each in messages)
        if not tools and not has_calls:
            return list(messages), None
        if await self.knows_tools():
            return list(messages), tools or None
        plain = [_in_words(each) for each in messages]
        if tools:
            text = _TOLD.format(tools="\n".join(json.dumps(each, ensure_ascii=False) for each in tools))
            if plain and plain[0]["role"] == "system":
                plain[0] = {"role": "system", "content": f"{plain[0]['content']}\n\n{text}"}
            else:
                plain.insert(0, {"role": "system", "content": text})
        return plain, None

    async def said(self, text: str) -> list[Message]:
        """The messages in a conversation's text, by what the template writes between them."""
        firsts, marks = await self._between()
        role, begins = next(((role, mark) for role, mark in firsts if text.startswith(mark)), ("", ""))
        found: list[Message] = []
        at = len(begins)
        while role:
            nexts = [(where, len(mark), to) for to, mark in marks if (where := text.find(mark, at)) >= 0]
            end, length, to = min(nexts, default=(len(text), 0, ""))
            found.append({"role": role, "content": text[at:end]})
            at, role = end + length, to
        return found

    async def _between(self) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        """What may begin a conversation, and what stands between two messages, each with the role of what follows."""
        if self._marks is None:
            roles = ("system", "user", "assistant", "user")
            whole = await self._gaps(roles)
            firsts = [("user", (await self._gaps(("user",)))[0]), ("system", whole[0])]
            self._marks = firsts, [("user", whole[3]), ("assistant", whole[2]), ("user", whole[1])]
        return self._marks

    async def _gaps(self, roles: Sequence[str]) -> list[str]:
        """What the template writes before each of these messages."""
        probes = [f"\x1a{number}\x1a" for number in range(len(roles))]
        turns = [{"role": role, "content": probe} for role, probe in zip(roles, probes, strict=True)]
        text, found = await sym.aio.chat_template(turns, add_generation_prompt=False), list[str]()
        for probe in probes:
            gap, _, text = text.partition(probe)
            found.append(gap)
        return found

    async def knows_tools(self) -> bool:
        """Whether the model's template writes the tools that it is given."""
        if self._knows_tools is None:
            question = [{"role": "user", "content": "a"}]
            tool = {"type": "function", "function": {"name": "a_tool", "description": "", "parameters": {}}}
            try:
                self._knows_tools = "a_tool" in await sym.aio.chat_template(question, [tool])
            except sym.Invalid:
                self._knows_tools = False
        return self._knows_tools


def variables_of(fields: Fields) -> dict[str, Any] | None:
    """Return the template's variables in `chat_template_kwargs`."""
    given = fields.child("chat_template_kwargs")
    return None if given is None else given.body


def truncated(fields: Fields, tokens: list[int], room: int) -> list[int]:
    """The last of a prompt's tokens, or the first, as many as `truncate_prompt_tokens` says; -1 fills the room."""
    most = fields.whole("truncate_prompt_tokens", -1, _MOST_TOKENS)
    side = fields.one_of("truncation_side", ("left", "right"), "left")
    if most is None:
        return tokens
    if most == 0:
        raise fields.wrong("truncate_prompt_tokens", "a token at least, or -1")
    most = max(1, room) if most == -1 else most
    return tokens[-most:] if side == "left" else tokens[:most]


def _in_words(message: Message) -> Message:
    """A message of calls, or of what came of one, as a text that any template can have."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [_call_text(each["function"]) for each in message.get("tool_calls", ())]
    text = "\n".join([message["content"], *calls] if message["content"] else calls)
    return {"role": message["role"], "content": text} if calls else message


def _call_text(function: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>"
