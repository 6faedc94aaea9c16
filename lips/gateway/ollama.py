"""Ollama's interface, /api: translated from and to the same prompts."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import libsym as sym
from lips.gateway.asgi import LINES, Emit, Json, Streamed, Whole, Work, line
from lips.gateway.engine import Answers, Wanted
from lips.gateway.errors import ApiError, ollama_form
from lips.gateway.fields import Fields, parse_inner
from lips.gateway.gateway import IGNORED, Gateway
from lips.gateway.names import session_for
from lips.gateway.prompts import Message, messages_of
from lips.gateway.request_fields import TREES
from lips.gateway.sampling import sampling
from lips.gateway.spoken import hear
from lips.gateway.tenants import Tenant
from lips.gateway.tools import Arguments, Call, Choice, Part, ToolParser

SPOKEN = "0.9.0"
"""The release of Ollama whose interface this is. Clients look for what a newer one has."""
_OPTIONS = TREES["/api/chat"].children["options"].children
_LEAST = {"num_predict": 1, "seed": 0}
"""Less is Ollama's word for none."""
_NEVER = "9999-12-31T23:59:59Z"


@dataclass(slots=True)
class Asked:
    """A request, checked."""

    gateway: Gateway
    tenant: Tenant
    wanted: Wanted
    parser: ToolParser | None
    is_chat: bool
    has_context: bool
    """The end of the answer has the tokens that a later request goes on from."""
    began_ns: int = field(default_factory=time.monotonic_ns)

    def part(self, text: str, calls: list[dict[str, Any]] | None = None, **more: Any) -> dict[str, Any]:
        """Of the answer, or all of it."""
        said: dict[str, Any] = {"response": text}
        if self.is_chat:
            said = {"message": {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}}
        return {"model": self.gateway.model.name, "created_at": _now(), **said, "done": False, **more}


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


async def chat(request: Request) -> Work | Response:
    gateway, tenant, fields = await _fields(request)
    if not fields.list("messages"):
        return _loaded(gateway, fields, is_chat=True)
    turns, choice = messages_of(_as_openai(fields)), Choice.of(Fields({"tools": fields.body.get("tools")}))
    told_turns, tools = await gateway.prompts.turns(turns, choice.tools)
    tokens, grammar = await sym.aio.chat_tokens(told_turns, tools), _grammar(fields)
    wanted = _wanted(gateway, tenant, request, fields, tokens, grammar)
    parser = choice.parser(is_json=grammar is not None)
    return _work(Asked(gateway, tenant, wanted, parser, is_chat=True, has_context=False))


async def generate(request: Request) -> Work | Response:
    gateway, tenant, fields = await _fields(request)
    if fields.list("context") and fields.has("system"):
        request.scope[IGNORED].add("system", is_known=True)
    if not fields.text("prompt"):
        return _loaded(gateway, fields, is_chat=False)
    tokens = await _prompt(gateway, fields)
    wanted = _wanted(gateway, tenant, request, fields, tokens, _grammar(fields))
    return _work(Asked(gateway, tenant, wanted, None, is_chat=False, has_context=not fields.flag("raw")))


async def _fields(request: Request) -> tuple[Gateway, Tenant, Fields]:
    gateway: Gateway = request.app.state.gateway
    tenant = await gateway.tenant_of(request)
    return gateway, tenant, await gateway.fields_of(request, tenant)


def _as_openai(fields: Fields) -> Fields:
    """The same messages in OpenAI's form: arguments of calls are texts there, and a tool's name is a name."""
    messages = []
    for each in fields.children("messages"):
        message = {**each.body, "tool_calls": [_call(call) for call in each.children("tool_calls")]}
        messages.append({**message, "name": each.text("tool_name", each.text("name"))})
    return Fields({"messages": messages})


def _call(fields: Fields) -> dict[str, Any]:
    function = fields.child("function")
    if function is None:
        raise ApiError(400, f"{fields.name_of('function')} is missing", param=fields.name_of("function"))
    arguments = function.child("arguments")
    given = {"name": function.required("name"), "arguments": json.dumps({} if arguments is None else arguments.body)}
    return {"id": fields.text("id", ""), "type": "function", "function": given}


async def _prompt(gateway: Gateway, fields: Fields) -> list[int]:
    """Text as it is, or a question that begins a conversation, or goes on with the tokens of one."""
    prompt, system = fields.text("prompt", "") or "", fields.text("system")
    if fields.flag("raw"):
        for name in ("system", "context"):
            if fields.body.get(name):
                raise ApiError(400, f"{name}: a raw prompt is all that the model sees", param=name)
        return await sym.aio.tokenize(prompt)
    turn: list[Message] = [{"role": "user", "content": prompt}]
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


def _wanted(
    gateway: Gateway, tenant: Tenant, request: Request, fields: Fields, tokens: list[int], grammar: sym.Grammar | None
) -> Wanted:
    given = fields.child("options")
    options = {
        name: value
        for name, value in (given.body if given else {}).items()
        if name in _OPTIONS and not (type(value) is int and value < _LEAST.get(name, value))
    }
    return Wanted(
        tokens=tokens,
        sampling=sampling(Fields(options, "options."), gateway.sampling, max_tokens_names=("num_predict",)),
        grammar=grammar,
        session=session_for(tenant, request, Fields({"session_id": fields.body.get("session_id")})),
        deadline_s=gateway.settings.answer_s,
        is_streamed=fields.flag("stream", True),
    )


def _loaded(gateway: Gateway, fields: Fields, *, is_chat: bool) -> Response:
    """The answer to no question: clients load and unload a model so. This one stays."""
    reason = "unload" if fields.body.get("keep_alive") in (0, "0", "0s") else "load"
    said = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
    head = {"model": gateway.model.name, "created_at": _now()}
    return Json({**head, **said, "done": True, "done_reason": reason})


def _work(asked: Asked) -> Work:
    if asked.wanted.is_streamed:
        return Streamed(partial(_lines, asked), ollama_form, lambda error: line(ollama_form(error)), LINES)
    return Whole(lambda: _whole(asked), ollama_form)


class _Said:
    """An answer so far. A call comes as a whole: its arguments are an object."""

    def __init__(self) -> None:
        self.text = ""
        self.calls: list[dict[str, Any]] = []
        self._arguments: str | None = None

    def add(self, part: Part) -> None:
        match part:
            case Call(name):
                self.end_call()
                self.calls.append({"function": {"name": name, "arguments": {}}})
                self._arguments = ""
            case Arguments(text):
                self._arguments = (self._arguments or "") + text
            case str():
                self.end_call()
                self.text += part

    def end_call(self) -> None:
        """The last call, if one is open, has all of its arguments; those that were cut off are none."""
        if self._arguments:
            try:
                self.calls[-1]["function"]["arguments"] = parse_inner(self._arguments)
            except ValueError:
                self.calls[-1]["function"]["arguments"] = {}
        self._arguments = None

    def take(self) -> tuple[str, list[dict[str, Any]]]:
        """Return the text and the calls that are whole and were not taken yet."""
        num_whole = len(self.calls) - (self._arguments is not None)
        found = self.text, self.calls[:num_whole]
        self.text, self.calls = "", self.calls[num_whole:]
        return found


async def _lines(asked: Asked, emit: Emit) -> None:
    said = _Said()

    async def send() -> None:
        text, calls = said.take()
        if text or calls:
            await emit(line(asked.part(text, calls)))

    async def take(part: Part) -> None:
        said.add(part)
        await send()

    async with asked.gateway.answered(asked.tenant, asked.wanted) as answers:
        first_ns = time.monotonic_ns()
        await hear(answers, asked.parser, take)
        said.end_call()
        await send()
        end = await _end(asked, answers, first_ns)
    await emit(line(asked.part("", **end)))  # a conversation's file has all of the answer by now


async def _whole(asked: Asked) -> dict[str, Any]:
    said = _Said()

    async def take(part: Part) -> None:
        said.add(part)

    async with asked.gateway.answered(asked.tenant, asked.wanted) as answers:
        first_ns = time.monotonic_ns()
        await hear(answers, asked.parser, take)
        said.end_call()
        end = await _end(asked, answers, first_ns)
    return asked.part(*said.take(), **end)


async def _end(asked: Asked, answers: Answers, first_ns: int) -> dict[str, Any]:
    """Return the last message of an answer. Durations are nanoseconds; the model was loaded before."""
    answer, now_ns = answers.answers[0], time.monotonic_ns()
    ended: dict[str, Any] = {
        "done": True,
        "done_reason": answer.finish,
        "total_duration": now_ns - asked.began_ns,
        "load_duration": 0,
        "prompt_eval_count": answers.num_prompt,
        "prompt_eval_duration": first_ns - asked.began_ns,
        "eval_count": answers.num_completion,
        "eval_duration": now_ns - first_ns,
    }
    if asked.has_context:
        generation = answer.generation
        tokens = generation.tokens
        if answer.stop_text is not None:  # the answer is without it, and its tokens are others
            tokens = await sym.aio.tokenize(await generation.full_text(), special=False)
        ended["context"] = [*asked.wanted.tokens, *tokens]
    return ended


async def tags(request: Request) -> Response:
    """The one model that there is."""
    return await _models(request)


async def ps(request: Request) -> Response:
    """As `tags`: the model is loaded, for as long as its daemon runs."""
    gateway: Gateway = request.app.state.gateway
    return await _models(request, expires_at=_NEVER, size_vram=0, context_length=gateway.model.max_positions)


async def _models(request: Request, **more: Any) -> Response:
    gateway: Gateway = request.app.state.gateway
    await gateway.tenant_of(request)
    name, about = gateway.model.name, {"size": 0, "digest": _digest(gateway.model), "details": _details(gateway.model)}
    return Json({"models": [{"name": name, "model": name, "modified_at": _began(gateway), **about, **more}]})


async def show(request: Request) -> Response:
    gateway: Gateway = request.app.state.gateway
    tenant = await gateway.tenant_of(request)
    fields = await gateway.fields_of(request, tenant)
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
    """The same as long as the model's facts are: clients tell models apart by it."""
    return hashlib.sha256(
        f"{model.name} {model.architecture} {model.vocab_size} {model.max_positions}".encode()
    ).hexdigest()


def _details(model: sym.ModelInfo) -> dict[str, Any]:
    families = [model.architecture]
    return {
        "format": "",
        "family": model.architecture,
        "families": families,
        "parameter_size": "",
        "quantization_level": "",
    }


def _began(gateway: Gateway) -> str:
    return datetime.fromtimestamp(gateway.started_s, UTC).isoformat().replace("+00:00", "Z")


async def version(_request: Request) -> Response:
    return Json({"version": SPOKEN})


async def no_embeddings(request: Request) -> Response:
    return await _lacking(request, "this server has no embeddings")


async def no_download(request: Request) -> Response:
    return await _lacking(request, "nothing is downloaded here: the daemon is started with its model")


async def _lacking(request: Request, why: str) -> Response:
    gateway: Gateway = request.app.state.gateway
    await gateway.tenant_of(request)
    raise ApiError(501, why)


routes = [
    Route("/api/tags", tags),
    Route("/api/ps", ps),
    Route("/api/version", version),
    Route("/api/show", show, methods=["POST"]),
    Route("/api/chat", chat, methods=["POST"]),
    Route("/api/generate", generate, methods=["POST"]),
    Route("/api/embed", no_embeddings, methods=["POST"]),
    Route("/api/embeddings", no_embeddings, methods=["POST"]),
    Route("/api/pull", no_download, methods=["POST"]),
]
