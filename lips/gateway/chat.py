"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.routing import Route

from lips.gateway.asgi import Work
from lips.gateway.constraints import response_format
from lips.gateway.errors import ApiError
from lips.gateway.logprobs import chat_form, scored
from lips.gateway.openai import OpenAIWriter, with_extras
from lips.gateway.prompts import messages_of
from lips.gateway.reader import received
from lips.gateway.said import Block, Change, Said
from lips.gateway.sampling import chat_logprobs, sampling
from lips.gateway.tools import ToolChoice


async def chat_completions(request: Request) -> Work:
    got = await received(request)
    fields, messages = got.fields, messages_of(got.fields)
    choice = ToolChoice.of(fields)
    how = replace(sampling(fields, got.gateway.sampling), logprobs=chat_logprobs(fields))
    own_format = choice.named_grammar() or response_format(fields)
    asked = with_extras(fields, await got.spoken(messages, choice, how, own_format))
    is_turn = asked.prompt.turn is not None
    if is_turn and how.n > 1:
        raise ApiError(400, "n is more than 1: a conversation goes on with one answer", param="n")
    if is_turn and asked.prompt_top is not None:
        raise ApiError(400, "prompt_logprobs: a conversation has its tokens already", param="prompt_logprobs")
    if fields.flag("echo") and messages[-1]["role"] == "assistant":
        asked = replace(asked, echo=messages[-1]["content"])
    return _ChatWriter(got, asked).work()


class _ChatWriter(OpenAIWriter):
    """Writer of chat messages and their deltas."""

    id_prefix = "chatcmpl"
    kinds = "chat.completion", "chat.completion.chunk"

    def begin(self) -> None:
        for each in self.said:
            begun = {"role": "assistant", "content": self.asked.echo or "", "refusal": None}
            choice = {"index": each.index, "delta": begun, "logprobs": None, "finish_reason": None}
            self.put_choices([choice], **self.facts(self.asked, self.given, ()))

    def tell(self, said: Said, changes: Sequence[Change]) -> None:
        for kind, block, text in changes:
            if kind == "grows" and block.call is None and self.is_plain:
                self.put_text(said, text)
            elif delta := _delta(said, kind, block, text):
                self.put_choices([self._choice(said, {"delta": delta}, None)])
        if said.finish is not None:
            self.put_choices([self._choice(said, {"delta": {}}, _finish(said))])

    def text_form(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def choices(self) -> list[dict[str, Any]]:
        return [self._choice(each, {"message": self._message(each)}, _finish(each)) for each in self.said]

    def _choice(self, said: Said, told: dict[str, Any], finish: str | None) -> dict[str, Any]:
        """Return a choice, or its next part, with the tokens since its previous part."""
        piece, top, logprobs = said.take(), self.asked.sampling.logprobs, None
        if top is not None and (piece.tokens or not finish):
            logprobs = {"content": chat_form(piece, self.gateway.vocabulary, top), "refusal": None}
        tokens = {"token_ids": piece.tokens} if self.asked.wants_tokens else {}
        return {"index": said.index, **told, "logprobs": logprobs, "finish_reason": finish, **tokens}

    def _message(self, said: Said) -> dict[str, Any]:
        text = (self.asked.echo or "") + said.text
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls := [_call(block, block.text) for block in said.calls]:
            message |= {"content": text or None, "tool_calls": calls}
        return message

    async def about_prompt(self) -> dict[str, Any]:
        top, tokens = self.asked.prompt_top, self.asked.prompt.tokens
        dists = () if top is None else await scored(self.gateway, self.tenant, tokens, top)
        return self.facts(self.asked, self.given, dists)


def _delta(said: Said, kind: str, block: Block, text: str) -> dict[str, Any] | None:
    index = sum(each.call is not None for each in said.blocks[: block.index])
    if kind == "begins" and block.call is not None:
        return {"tool_calls": [{"index": index, **_call(block, "")}]}
    if kind == "grows":
        call = {"index": index, "function": {"arguments": text}}
        return {"content": text} if block.call is None else {"tool_calls": [call]}
    return None


def _call(block: Block, arguments: str) -> dict[str, Any]:
    return {"id": f"call_{block.id}", "type": "function", "function": {"name": block.call, "arguments": arguments}}


def _finish(said: Said) -> str:
    return "tool_calls" if said.calls and said.finish == "stop" else str(said.finish)


routes = [Route("/v1/chat/completions", chat_completions, methods=["POST"])]
