"""/v1/responses: answers that the server keeps, so that the next request says only what is new."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Literal

import anyio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import libsym as sym
from lips.gateway import responses_form as form
from lips.gateway import stored
from lips.gateway.asgi import Emit, Json, Streamed, Whole, Work, event, told
from lips.gateway.constraints import bounds, response_format
from lips.gateway.engine import Answers, Wanted
from lips.gateway.errors import ApiError, openai_form
from lips.gateway.fields import Fields
from lips.gateway.gateway import ENDED, Gateway
from lips.gateway.names import conversation_of, session_for
from lips.gateway.request_fields import refused
from lips.gateway.sampling import MAX_TOKENS_NAMES, sampling
from lips.gateway.spoken import hear
from lips.gateway.stored import Stored
from lips.gateway.tenants import Session, Tenant
from lips.gateway.tools import Arguments, Call, Choice, Part

log = logging.getLogger(__name__)
Ended = Literal["cancel", "removal"]
Take = Callable[[str, dict[str, Any]], Awaitable[None]]
"""Is told an event of a response."""
_MAX_PAGE = 100
_ECHOED = (
    *("instructions", "metadata", "parallel_tool_calls", "previous_response_id", "temperature", "tool_choice"),
    *(
        "top_p",
        "truncation",
        "max_output_tokens",
        "text",
        "reasoning",
        "store",
        "user",
        "prompt_cache_key",
        "background",
    ),
)
_SET = {"parallel_tool_calls": True, "tool_choice": "auto", "temperature": 1.0, "top_p": 1.0, "truncation": "disabled"}


@dataclass(slots=True)
class Asked:
    """A request, checked, and what has come of it."""

    gateway: Gateway
    tenant: Tenant
    wanted: Wanted
    choice: Choice
    items: list[form.Item]
    """All of the conversation."""
    is_stored: bool
    about: dict[str, Any]
    id: str
    created: int = field(default_factory=lambda: int(time.time()))
    output: list[form.Item] = field(default_factory=list)
    ended_by: Ended | None = None
    """Another request, by the id."""
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    """Of what is computed."""
    is_over: anyio.Event = field(default_factory=anyio.Event)

    def end(self, by: Ended) -> None:
        self.ended_by = by
        self.scope.cancel()

    def response(self, status: str, answers: Answers | None = None, error: ApiError | None = None) -> dict[str, Any]:
        """The object, as it is now."""
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "model": self.gateway.model.name,
            "status": status,
            "error": None if error is None else stored.error_form(error.message),
            "incomplete_details": reason,
            "output": list(self.output),
            "tools": [],
            "usage": None if answers is None else form.usage(answers),
            **self.about,
        }


async def responses(request: Request) -> Work | Response:
    gateway: Gateway = request.app.state.gateway
    tenant = await gateway.tenant_of(request)
    fields = await gateway.fields_of(request, tenant)
    asked = await _asked(gateway, tenant, request, fields)
    is_streamed = fields.flag("stream")
    if fields.flag("background"):
        if not asked.is_stored or is_streamed:
            raise ApiError(
                400, "background needs store: true, and no stream: GET tells what it is at", param="background"
            )
        await stored.save(tenant, Stored(asked.response("queued"), asked.items))
        gateway.responses[tenant.name, asked.id] = asked
        gateway.background.start_soon(_in_background, asked, request.scope[ENDED].pop_all())
        return Json(asked.response("queued"))
    if is_streamed:
        return Streamed(partial(_events, asked), openai_form, partial(_failed, asked))
    return Whole(lambda: _response(asked), openai_form)


async def _asked(gateway: Gateway, tenant: Tenant, request: Request, fields: Fields) -> Asked:
    items, choice = form.items_of(fields), form.choice_of(fields)
    instructions, previous = fields.text("instructions"), fields.text("previous_response_id")
    response_id, is_stored = f"resp_{secrets.token_hex(12)}", fields.flag("store", True)
    conversation = conversation_of(fields)
    if previous is not None:
        if conversation is not None:
            raise ApiError(
                400, "previous_response_id and conversation are two ways to go on: give one", param="conversation"
            )
        before = await _load(gateway, tenant, previous)
        if before.response["status"] in stored.UNDER_WAY:
            raise ApiError(409, f"{previous} has not ended yet", param="previous_response_id")
        items = [*before.items, *before.response["output"], *items]
    _check_included(fields)
    how = sampling(fields, gateway.sampling, max_tokens_names=("max_output_tokens", *MAX_TOKENS_NAMES))
    own_format = choice.named_grammar() or response_format(form.format_of(fields))
    bound = bounds(fields, how, gateway.model, own_format)
    prompt = await gateway.prompts.prompt(
        fields,
        form.messages_of_items(items, instructions),
        choice.tools,
        is_turn=conversation is not None,
        room=gateway.room(how),
    )
    own = Session(stored.kv_path(tenant, response_id)) if is_stored else None
    session = session_for(tenant, request, fields)
    wanted = Wanted(
        tokens=prompt.tokens,
        turn=prompt.turn,
        tools=prompt.tools,
        begin=prompt.begin,
        sampling=bound.sampling,
        grammar=bound.grammar,
        is_format=bound.is_format,
        session=session if conversation else own or session,
        base=Session(stored.kv_path(tenant, previous)) if previous else session,
        deadline_s=gateway.settings.answer_s,
        is_streamed=fields.flag("stream") or fields.flag("background"),
    )
    about = {name: fields.body.get(name, {**_SET, **gateway.sampling}.get(name)) for name in _ECHOED}
    about |= {"store": is_stored, "metadata": fields.body.get("metadata") or {}}
    return Asked(gateway, tenant, wanted, choice, items, is_stored, about, response_id)


def _check_included(fields: Fields) -> None:
    """Refuse log-probabilities: everything else in `include` is of tools that this server does not have."""
    if "message.output_text.logprobs" in (fields.list("include") or ()):
        raise refused("include")


async def _response(asked: Asked) -> dict[str, Any]:
    """All of it, when it has ended."""

    async def take(kind: str, more: dict[str, Any]) -> None:
        pass

    return await _answer(asked, take)


async def _events(asked: Asked, emit: Emit) -> None:
    numbers = count()

    async def take(kind: str, more: dict[str, Any]) -> None:
        await emit(event({"type": kind, "sequence_number": next(numbers), **more}, kind))

    await _answer(asked, take)


def _failed(asked: Asked, error: ApiError) -> bytes:
    kind = "response.failed"
    return event({"type": kind, "sequence_number": 1 << 20, "response": asked.response("failed", error=error)}, kind)


async def _in_background(asked: Asked, ended: ExitStack) -> None:
    """Nothing that goes wrong leaves it: the server is its parent. `ended`: what is left to do when it has ended."""
    with ended:
        await _respond(asked)


async def _respond(asked: Asked) -> None:
    try:
        await _response(asked)
    except Exception as error:  # noqa: BLE001 - `told` knows every kind, and the response tells it
        failed = asked.response("failed", error=told(error))
        try:
            await stored.save(asked.tenant, Stored(failed, asked.items))
        except Exception as why:  # noqa: BLE001 - the client reads that it is not known what became of it
            log.warning("%s failed, which could not be kept: %s", asked.id, why)


async def _answer(asked: Asked, take: Take) -> dict[str, Any]:
    """Tells the events of a response, in their order; gives the response in the end."""
    asked.gateway.responses[asked.tenant.name, asked.id] = asked
    is_kept = False
    try:
        status, answers = await _compute(asked, take)
        response = asked.response(status, answers)
        if asked.is_stored and asked.ended_by != "removal":
            await _store(asked, response)
            is_kept = True
        await take(f"response.{response['status']}", {"response": response})
        return response
    finally:
        with anyio.CancelScope(shield=True):
            if asked.is_stored and not is_kept and asked.wanted.turn is None:
                await stored.remove_kv(asked.tenant, asked.id)
        del asked.gateway.responses[asked.tenant.name, asked.id]
        asked.is_over.set()


async def _compute(asked: Asked, take: Take) -> tuple[str, Answers | None]:
    """The status that it ends with; no answers: it was cancelled before it had begun."""
    answers, status, items = None, "cancelled", _Items(asked, take)
    with asked.scope:
        async with asked.gateway.answered(asked.tenant, asked.wanted) as answers:
            await take("response.created", {"response": asked.response("in_progress")})
            await take("response.in_progress", {"response": asked.response("in_progress")})
            await hear(answers, asked.choice.parser(is_json=asked.wanted.is_format), items.take)
            status = "incomplete" if answers.answers[0].finish == "length" else "completed"
    await items.end("completed" if status == "completed" else "incomplete")
    return status, answers


async def _store(asked: Asked, response: dict[str, Any]) -> None:
    with asked.tenant.use():
        await stored.save(asked.tenant, Stored(response, asked.items))
        if asked.wanted.turn is not None:
            return
        with suppress(sym.NotFound):  # where it could not be saved, the log says why
            await sym.aio.kv_advise(stored.kv_path(asked.tenant, asked.id), sym.TTL(stored.KEPT_S))


class _Items:
    """What the answer says, as the items that it is."""

    def __init__(self, asked: Asked, take: Take) -> None:
        self._asked = asked
        self._tell = take
        self._item: form.Item | None = None
        self._said = ""

    @property
    def _where(self) -> dict[str, Any]:
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": len(self._asked.output)}

    async def take(self, part: Part) -> None:
        match part:
            case Call():
                await self._begin(form.call_item(part))
            case Arguments(text):
                self._said += text
                await self._tell("response.function_call_arguments.delta", {**self._where, "delta": text})
            case str():
                if self._item is None or self._item["type"] != "message":
                    await self._begin(form.message_item())
                    begun = {"content_index": 0, "part": form.text_part("")}
                    await self._tell("response.content_part.added", {**self._where, **begun})
                self._said += part
                delta = {"content_index": 0, "delta": part, "logprobs": []}
                await self._tell("response.output_text.delta", {**self._where, **delta})

    async def _begin(self, item: form.Item) -> None:
        await self.end()
        self._item = item
        begun = {"output_index": len(self._asked.output), "item": item}
        await self._tell("response.output_item.added", begun)

    async def end(self, status: str = "completed") -> None:
        """Of the item that there is."""
        if self._item is None:
            return
        where, said = self._where, self._said
        if self._item["type"] == "message":
            part = form.text_part(said)
            await self._tell("response.output_text.done", {**where, "content_index": 0, "text": said, "logprobs": []})
            await self._tell("response.content_part.done", {**where, "content_index": 0, "part": part})
            item = {**self._item, "status": status, "content": [part]}
        else:
            whole = {"name": self._item["name"], "arguments": said}
            await self._tell("response.function_call_arguments.done", {**where, **whole})
            item = {**self._item, "status": status, "arguments": said}
        self._asked.output.append(item)
        self._item, self._said = None, ""
        await self._tell("response.output_item.done", {"output_index": where["output_index"], "item": item})


async def get_response(request: Request) -> Response:
    gateway, tenant, response_id = await _about(request)
    running = gateway.responses.get((tenant.name, response_id))
    if running is not None:
        return Json(running.response("in_progress"))
    return Json((await _load(gateway, tenant, response_id)).response)


async def _load(gateway: Gateway, tenant: Tenant, response_id: str) -> Stored:
    """One that has the status of being made, and that nobody makes any more, has failed."""
    found = await stored.load(tenant, response_id)
    if found.response["status"] in stored.UNDER_WAY and (tenant.name, response_id) not in gateway.responses:
        error = stored.error_form("the gateway ended before it was made")
        found.response.update({"status": "failed", "error": error})
    return found


async def get_input_items(request: Request) -> Response:
    """A page of them, the last first unless `order` is asc."""
    gateway, tenant, response_id = await _about(request)
    items = form.with_ids((await _load(gateway, tenant, response_id)).items, response_id)
    query = Fields(dict(request.query_params))
    if query.one_of("order", ("asc", "desc"), "desc") == "desc":
        items.reverse()
    limit, after = query.text("limit", "20") or "", query.text("after")
    if not limit.isdecimal() or not 1 <= int(limit) <= _MAX_PAGE:
        raise query.wrong("limit", f"a number from 1 to {_MAX_PAGE}")
    if after is not None:
        places = [place for place, item in enumerate(items, 1) if item["id"] == after]
        if not places:
            raise ApiError(404, f"there is no item {after[:60]}", param="after")
        items = items[places[0] :]
    page = items[: int(limit)]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return Json({"object": "list", "data": page, **ends, "has_more": len(items) > len(page)})


async def delete_response(request: Request) -> Response:
    """One that is being made ends, and leaves nothing."""
    gateway, tenant, response_id = await _about(request)
    running = gateway.responses.get((tenant.name, response_id))
    if running is not None:
        running.end("removal")
        await running.is_over.wait()
    with tenant.use():
        try:
            await stored.remove(tenant, response_id)
        except ApiError:
            if running is None:  # else it was not kept before its end
                raise
    return Json({"id": response_id, "object": "response", "deleted": True})


async def cancel_response(request: Request) -> Response:
    """Ends it where it is; what has come is kept."""
    gateway, tenant, response_id = await _about(request)
    running = gateway.responses.get((tenant.name, response_id))
    if running is None:
        return Json((await _load(gateway, tenant, response_id)).response)
    running.end("cancel")
    await running.is_over.wait()
    if not running.is_stored:
        return Json(running.response("cancelled"))
    return Json((await _load(gateway, tenant, response_id)).response)


async def _about(request: Request) -> tuple[Gateway, Tenant, str]:
    gateway: Gateway = request.app.state.gateway
    return gateway, await gateway.tenant_of(request), stored.checked(request.path_params["id"])


routes = [
    Route("/v1/responses", responses, methods=["POST"]),
    Route("/v1/responses/{id}", get_response, methods=["GET"]),
    Route("/v1/responses/{id}", delete_response, methods=["DELETE"]),
    Route("/v1/responses/{id}/input_items", get_input_items, methods=["GET"]),
    Route("/v1/responses/{id}/cancel", cancel_response, methods=["POST"]),
]
