"""Messages as a model was trained to see them: read from a request, and given to its template, with tools if need be."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import libsym as sym
from lips.gateway.errors import ApiError
from lips.gateway.fields import Fields

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
    message["content"] = _content(fields)
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
    name, text = function.required("name"), function.text("arguments", "{}") or "{}"
    try:
        arguments = json.loads(text)
    except ValueError:
        arguments = text
    return {"id": fields.text("id", ""), "type": "function", "function": {"name": name, "arguments": arguments}}


class Prompts:
    """Of the model that is served."""

    def __init__(self) -> None:
        self._knows_tools: bool | None = None

    async def tokens(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> list[int]:
        """The prompt of a whole conversation."""
        turns, told = await self.turns(messages, tools)
        return await sym.aio.chat_tokens(turns, told)

    async def turns(
        self, messages: Sequence[Message], tools: Sequence[Any] | None
    ) -> tuple[list[Message], Sequence[Any] | None]:
        """Messages and tools as the template takes them: where it knows no tools they are told in the system's words."""
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


def _in_words(message: Message) -> Message:
    """A message of calls, or of what came of one, as a text that any template can have."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [_call_text(each["function"]) for each in message.get("tool_calls", ())]
    text = "\n".join([message["content"], *calls] if message["content"] else calls)
    return {"role": message["role"], "content": text} if calls else message


def _call_text(function: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>"
