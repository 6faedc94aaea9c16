"""Ollama's interface, /api: translated to and from the common record."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import libsym as sym
from lips.gateway.asgi import LINES, Json, Work, line
from lips.gateway.asked import Asked
from lips.gateway.errors import ApiError, ollama_form
from lips.gateway.fields import Fields
from lips.gateway.gateway import IGNORED, Gateway
from lips.gateway.log import SEEN
from lips.gateway.prompts import ChatMessage, Prompt, messages_of
from lips.gateway.reader import Received, asker, received
from lips.gateway.request_fields import TREES
from lips.gateway.said import Block, Change, Said
from lips.gateway.sampling import sampling
from lips.gateway.tools import NO_TOOLS, ToolChoice
from lips.gateway.writer import Writer

RELEASE = "0.9.0"
"""Release of Ollama that the gateway claims to be. With a newer number, clients would expect newer functions."""
_OPTIONS = TREES["/api/chat"].children["options"].children
_LEAST = {"num_predict": 1, "seed": 0}
"""Least values of options; in Ollama a smaller value means that the option is not set."""
_NEVER = "9999-12-31T23:59:59Z"


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


async def chat(request: Request) -> Work | Response:
    got = await received(request)
    fields, gateway = got.fields, got.gateway
    if not fields.list("messages"):
        return _loaded(got, is_chat=True)
    turns, choice = messages_of(_as_openai(fields), _given), ToolChoice.of(Fields({"tools": fields.body.get("tools")}))
    tokens, grammar = await gateway.prompts.tokens(turns, choice.tools), _grammar(fields)
    return _OllamaWriter(got, _asked(got, tokens, grammar, choice), is_chat=True).work()


async def generate(request: Request) -> Work | Response:
    got = await received(request)
    fields = got.fields
    if fields.list("context") and fields.has("system"):
        request.scope[IGNORED].add("system", is_known=True)
    if not fields.text("prompt"):
        return _loaded(got, is_chat=False)
    tokens = await _prompt(got.gateway, fields)
    return _OllamaWriter(got, _asked(got, tokens, _grammar(fields)), has_context=not fields.flag("raw")).work()


def _as_openai(fields: Fields) -> Fields:
    """Return the messages with OpenAI's field names: `tool_name` becomes `name`."""
    messages = [
        {**each.body, "name": each.text("tool_name", each.text("name"))} for each in fields.children("messages")
    ]
    return Fields({"messages": messages})


def _given(function: Fields) -> dict[str, Any]:
    """Return the arguments of an earlier call."""
    arguments = function.child("arguments")
    return {} if arguments is None else arguments.body


async def _prompt(gateway: Gateway, fields: Fields) -> list[int]:
    """Return the tokens of a raw text, or of a question. The tokens of its conversation precede the question."""
    prompt, system = fields.text("prompt", "") or "", fields.text("system")
    if fields.flag("raw"):
        for name in ("system", "context"):
            if fields.body.get(name):
                raise ApiError(400, f"{name}: a raw prompt is all that the model sees", param=name)
        return await sym.aio.tokenize(prompt)
    turn: list[ChatMessage] = [{"role": "user", "content": prompt}]
    if not (context := fields.list("context")):
        return await sym.aio.chat_tokens([*([{"role": "system", "content": system}] if system else []), *turn])
    if not all(type(token) is int and 0 <= token < gateway.model.vocab_size for token in context):
        raise fields.wrong("context", f"a list of tokens from 0 to {gateway.model.vocab_size - 1}")
    return context + await sym.aio.chat_tokens(turn, after_answer=True)


def _grammar(fields: Fields) -> sym.Grammar | None:
    """Return the grammar of `format`: any object, or JSON of a schema."""
    match fields.body.get("format"):
        case None | "":
            return None
        case "json":
            return sym.Grammar.json({"type": "object"}, compact=True)
        case dict(schema):
            return sym.Grammar.json(schema, compact=True)
    raise fields.wrong("format", "json or a schema")


def _asked(received: Received, tokens: list[int], grammar: sym.Grammar | None, choice: ToolChoice = NO_TOOLS) -> Asked:
    fields, given = received.fields, received.fields.child("options")
    options = {
        name: value
        for name, value in (given.body if given else {}).items()
        if name in _OPTIONS and not (type(value) is int and value < _LEAST.get(name, value))
    }
    how = sampling(Fields(options, "options."), received.gateway.sampling, max_tokens_names=("num_predict",))
    how = replace(how, grammar=grammar, is_format=grammar is not None)
    own = Fields({"session_id": fields.body.get("session_id"), "stream": fields.flag("stream", True)})
    return replace(received, fields=own).asked(Prompt(tokens=tokens), how, choice)


def _loaded(received: Received, *, is_chat: bool) -> Response:
    """Answer a request without a question, which clients send to load or unload a model. The model stays loaded."""
    reason = "unload" if received.fields.body.get("keep_alive") in (0, "0", "0s") else "load"
    return Json({**_part(received.gateway, "", is_chat=is_chat), "done": True, "done_reason": reason})


def _part(
    gateway: Gateway, text: str, calls: Sequence[dict[str, Any]] = (), *, is_chat: bool, **more: Any
) -> dict[str, Any]:
    """Return a part of an answer, or the whole answer, in Ollama's form."""
    said: dict[str, Any] = {"response": text}
    if is_chat:
        said = {"message": {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}}
    return {"model": gateway.model.name, "created_at": _now(), **said, "done": False, **more}


class _OllamaWriter(Writer):
    """Writer of lines of JSON. A call is sent as a whole, because its arguments are an object."""

    media_type = LINES

    def __init__(self, received: Received, asked: Asked, *, is_chat: bool = False, has_context: bool = False) -> None:
        """`has_context`: the end of the answer has the conversation's tokens, which a later request can continue."""
        super().__init__(received, asked)
        self._is_chat, self._has_context = is_chat, has_context

    def failed(self, error: ApiError) -> bytes:
        return line(ollama_form(error))

    def tell(self, _said: Said, changes: Sequence[Change]) -> None:
        text = "".join(text for kind, block, text in changes if kind == "grows" and block.call is None)
        calls = [block for kind, block, _ in changes if kind == "ends" and block.call is not None]
        if text or calls:
            self._tell(text, calls)

    def _tell(self, text: str, calls: Sequence[Block], **more: Any) -> None:
        self.put(line(self._form(text, calls, **more)))

    def _form(self, text: str, calls: Sequence[Block], **more: Any) -> dict[str, Any]:
        told = [{"function": {"name": block.call, "arguments": block.arguments}} for block in calls]
        return _part(self.gateway, text, told, is_chat=self._is_chat, **more)

    async def end(self) -> None:
        self._tell("", (), **await self._ended())

    async def whole(self) -> dict[str, Any]:
        [said] = self.said
        return self._form(said.text, said.calls, **await self._ended())

    async def _ended(self) -> dict[str, Any]:
        """Return the final facts of an answer. Durations are in nanoseconds; the loading time is 0."""
        [said], seen = self.said, SEEN.get()
        total_s, first_s = time.monotonic() - seen.began_s, seen.first_s or 0.0
        ended: dict[str, Any] = {
            "done": True,
            "done_reason": said.finish,
            "total_duration": int(total_s * 1e9),
            "load_duration": 0,
            "prompt_eval_count": self.usage.num_prompt,
            "prompt_eval_duration": int(first_s * 1e9),
            "eval_count": self.usage.num_completion,
            "eval_duration": int((total_s - first_s) * 1e9),
        }
        if self._has_context:
            tokens = said.tokens
            if said.stop_text is not None:  # the text ends before the stop text, so tokenize it anew
                tokens = await sym.aio.tokenize(said.text, special=False)
            ended["context"] = [*self.asked.prompt.tokens, *tokens]
        return ended


async def tags(request: Request) -> Response:
    """List the one model of the server."""
    return await _models(request)


async def ps(request: Request) -> Response:
    """List the loaded models. The server's model stays loaded as long as its daemon runs."""
    gateway: Gateway = request.app.state.gateway
    return await _models(request, expires_at=_NEVER, size_vram=0, context_length=gateway.model.max_positions)


async def _models(request: Request, **more: Any) -> Response:
    gateway, _ = await asker(request)
    name, about = gateway.model.name, {"size": 0, "digest": _digest(gateway.model), "details": _details(gateway.model)}
    return Json({"models": [{"name": name, "model": name, "modified_at": _began(gateway), **about, **more}]})


async def show(request: Request) -> Response:
    got = await received(request)
    fields, gateway = got.fields, got.gateway
    model, name = gateway.model, fields.text("model", fields.text("name")) or ""
    if name.removesuffix(":latest") != model.name:
        raise ApiError(404, f"model {name[:60]!r} not found: this server has {model.name}", code="model_not_found")
    facts = {
        "general.architecture": model.architecture,
        "general.basename": model.name,
        f"{model.architecture}.context_length": model.max_positions,
        f"{model.architecture}.vocab_size": model.vocab_size,
    }
    draws = "\n".join(f"{name} {value:g}" for name, value in gateway.sampling.items())
    about = {"details": _details(model), "model_info": facts, "capabilities": ["completion", "tools"]}
    return Json({"modelfile": f"FROM {model.name}\n", "parameters": draws, "modified_at": _began(gateway), **about})


def _digest(model: sym.ModelInfo) -> str:
    """Return a digest of the model's facts, by which clients tell models apart."""
    return hashlib.sha256(
        f"{model.name} {model.architecture} {model.vocab_size} {model.max_positions}".encode()
    ).hexdigest()


def _details(model: sym.ModelInfo) -> dict[str, Any]:
    family = model.architecture
    about = {"format": "", "family": family, "families": [family]}
    return {**about, "parameter_size": "", "quantization_level": ""}


def _began(gateway: Gateway) -> str:
    return datetime.fromtimestamp(gateway.started_s, UTC).isoformat().replace("+00:00", "Z")


async def version(_request: Request) -> Response:
    return Json({"version": RELEASE})


def _lacking(why: str) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that refuses every request, for a function that this server does not have."""

    async def refuse(request: Request) -> Response:
        await asker(request)
        raise ApiError(501, why)

    return refuse


_no_embeddings = _lacking("this server has no embeddings")
routes = [
    Route("/api/tags", tags),
    Route("/api/ps", ps),
    Route("/api/version", version),
    Route("/api/show", show, methods=["POST"]),
    Route("/api/chat", chat, methods=["POST"]),
    Route("/api/generate", generate, methods=["POST"]),
    Route("/api/embed", _no_embeddings, methods=["POST"]),
    Route("/api/embeddings", _no_embeddings, methods=["POST"]),
    Route("/api/pull", _lacking("nothing is downloaded here: the daemon is started with its model"), methods=["POST"]),
]
