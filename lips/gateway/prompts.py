"""Prompts: reads the messages of a request, and formats them and the tools by the model's template."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import libsym as sym
from lips.gateway.errors import ApiError
from lips.gateway.fields import Fields, parse_inner

ChatMessage = dict[str, Any]
TEXTS = ("text", "input_text", "output_text", "refusal", "summary_text")
"""Types of the parts of a message that hold text."""
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
    """Input of a model: the tokens of a whole conversation, or the next turn of a stored conversation."""

    tokens: Sequence[int] = ()
    turn: Sequence[ChatMessage] | None = None
    tools: Sequence[Any] | None = None
    begin: str = ""
    """Given beginning of the answer, which the model continues."""


def messages_of(fields: Fields, arguments: Callable[[Fields], Any] | None = None) -> list[ChatMessage]:
    """Return the messages of a request in OpenAI's form, with text as content. `arguments` reads a call's arguments."""
    fields.required("messages")
    found = [_message(each, arguments or arguments_of) for each in fields.children("messages")]
    if not found:
        raise no_message("messages")
    return found


def no_message(name: str) -> ApiError:
    return ApiError(400, f"{name} is empty: a message at least is expected", param=name)


def _message(fields: Fields, arguments: Callable[[Fields], Any]) -> ChatMessage:
    fields.required("role")
    role = fields.one_of("role", ROLES, "")
    message: ChatMessage = {"role": {"developer": "system", "function": "tool"}.get(role, role)}
    refusal = fields.text("refusal", "") or ""
    message["content"] = text_of(fields, "content") or refusal
    if calls := [_call(each, arguments) for each in fields.children("tool_calls")]:
        message["tool_calls"] = calls
    elif role not in {"assistant", "tool"}:
        fields.required("content")
    for each in ("name", "tool_call_id"):
        if (value := fields.text(each)) is not None:
            message[each] = value
    return message


def text_of(fields: Fields, name: str, kinds: Collection[str] = TEXTS, skipped: str | None = None) -> str:
    """Return a text, or the joined texts of a list of parts, without the parts that begin with `skipped`.

    ApiError: a part is of another kind, such as an image.
    """
    if isinstance(fields.body.get(name), str) or not fields.has(name):
        return fields.text(name, "") or ""
    texts = list[str]()
    for part in fields.children(name):
        if part.text("type", "text") not in kinds:
            raise no_text(part)
        text = part.text("text", part.text("refusal", "")) or ""
        texts += [] if skipped and text.startswith(skipped) else [text]
    return "\n".join(texts)


def no_text(part: Fields) -> ApiError:
    where = part.name_of("type")
    kind = part.body.get("type")
    return ApiError(400, f"{where} is {kind!r}: this model takes text", param=where, code="unsupported_content")


def arguments_of(function: Fields) -> Any:
    """Return the arguments of an earlier call as an object, as templates expect; as text if they are not JSON."""
    text = function.text("arguments", "{}") or "{}"
    try:
        return parse_inner(text)
    except ValueError:
        return text


def call_of(id_: str | None, name: str, arguments: Any) -> dict[str, Any]:
    """Return a call of an earlier message in the form that templates expect."""
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def _call(fields: Fields, arguments: Callable[[Fields], Any]) -> dict[str, Any]:
    function = fields.child("function")
    if function is None:
        raise ApiError(400, f"{fields.name_of('function')} is missing", param=fields.name_of("function"))
    return call_of(fields.text("id", ""), function.name("name"), arguments(function))


class Prompts:
    """Maker of prompts for the served model."""

    def __init__(self) -> None:
        self._knows_tools: bool | None = None
        self._marks: tuple[list[tuple[str, str]], list[tuple[str, str]]] | None = None

    async def tokens(
        self, messages: Sequence[ChatMessage], tools: Sequence[Any] | None, variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Return the tokens of a whole conversation."""
        turns, told = await self.turns(messages, tools)
        return await sym.aio.chat_tokens(turns, told, variables=variables)

    async def prompt(
        self, fields: Fields, messages: Sequence[ChatMessage], tools: Sequence[Any] | None, *, is_turn: bool, room: int
    ) -> Prompt:
        """Return the prompt for messages, with the options in the request's fields.

        `is_turn`: the messages continue a stored conversation. `room` is the maximum length of a truncated prompt.
        """
        turns, told = await self.turns(messages, tools)
        variables, opens, begin = variables_of(fields), fields.flag("add_generation_prompt", True), ""
        if fields.flag("continue_final_message"):
            if fields.flag("add_generation_prompt"):
                raise ApiError(
                    400,
                    "continue_final_message does not go with add_generation_prompt: true",
                    param="add_generation_prompt",
                )
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
        self, messages: Sequence[ChatMessage], tools: Sequence[Any] | None
    ) -> tuple[list[ChatMessage], Sequence[Any] | None]:
        """Return messages and tools for the template. If the template does not support tools, the system message lists
        them.
        """
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

    async def said(self, text: str) -> list[ChatMessage]:
        """Return the messages in the text of a conversation, split at the template's marks between messages."""
        firsts, marks = await self._between()
        role, begins = next(((role, mark) for role, mark in firsts if text.startswith(mark)), ("", ""))
        found: list[ChatMessage] = []
        at = len(begins)
        while role:
            nexts = [(where, len(mark), to) for to, mark in marks if (where := text.find(mark, at)) >= 0]
            end, length, to = min(nexts, default=(len(text), 0, ""))
            found.append({"role": role, "content": text[at:end]})
            at, role = end + length, to
        return found

    async def _between(self) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        """Return the template's marks before a first message and between two messages, each with the role after it."""
        if self._marks is None:
            roles = ("system", "user", "assistant", "user")
            whole = await self._gaps(roles)
            firsts = [("user", (await self._gaps(("user",)))[0]), ("system", whole[0])]
            self._marks = firsts, [("user", whole[3]), ("assistant", whole[2]), ("user", whole[1])]
        return self._marks

    async def _gaps(self, roles: Sequence[str]) -> list[str]:
        """Return the text that the template writes before each message, for messages with these roles."""
        probes = [f"\x1a{number}\x1a" for number in range(len(roles))]
        turns = [{"role": role, "content": probe} for role, probe in zip(roles, probes, strict=True)]
        text, found = await sym.aio.chat_template(turns, add_generation_prompt=False), list[str]()
        for probe in probes:
            gap, _, text = text.partition(probe)
            found.append(gap)
        return found

    async def knows_tools(self) -> bool:
        """Return whether the model's template supports tools: whether its output has the name of a test tool."""
        if self._knows_tools is None:
            question = [{"role": "user", "content": "a"}]
            tool = {"type": "function", "function": {"name": "a_tool", "description": "", "parameters": {}}}
            try:
                self._knows_tools = "a_tool" in await sym.aio.chat_template(question, [tool])
            except sym.Invalid:
                self._knows_tools = False
        return self._knows_tools


def variables_of(fields: Fields) -> dict[str, Any] | None:
    """Return the variables for the template from `chat_template_kwargs`."""
    given = fields.child("chat_template_kwargs")
    return None if given is None else given.body


def truncated(fields: Fields, tokens: list[int], room: int) -> list[int]:
    """Truncate a prompt to its last (or first) `truncate_prompt_tokens` tokens; -1 means `room`."""
    most = fields.whole("truncate_prompt_tokens", -1, _MOST_TOKENS)
    side = fields.one_of("truncation_side", ("left", "right"), "left")
    if most is None:
        return tokens
    if most == 0:
        raise fields.wrong("truncate_prompt_tokens", "a token at least, or -1")
    most = max(1, room) if most == -1 else most
    return tokens[-most:] if side == "left" else tokens[:most]


def _in_words(message: ChatMessage) -> ChatMessage:
    """Return a message with calls, or with a call's result, as plain text for templates without tools."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [_call_text(each["function"]) for each in message.get("tool_calls", ())]
    text = "\n".join([message["content"], *calls] if message["content"] else calls)
    return {"role": message["role"], "content": text} if calls else message


def _call_text(function: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>"
