"""/v1/responses: the server keeps answers, so that the next request needs only the new items."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import count
from typing import Any, Literal

import anyio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import libsym as sym
from lips.gateway import responses_form as form
from lips.gateway import stored
from lips.gateway.asgi import Json, Work, event, told
from lips.gateway.asked import Asked
from lips.gateway.constraints import response_format
from lips.gateway.errors import ApiError
from lips.gateway.fields import Fields
from lips.gateway.gateway import ENDED, Gateway
from lips.gateway.names import conversation_of
from lips.gateway.reader import Received, asker, received
from lips.gateway.request_fields import refused
from lips.gateway.said import Block, Change, Said
from lips.gateway.sampling import MAX_TOKENS_NAMES, sampling
from lips.gateway.stored import Stored
from lips.gateway.tenants import Session, Tenant
from lips.gateway.writer import Writer

log = logging.getLogger(__name__)
Ended = Literal["cancel", "removal"]
_MAX_PAGE = 100
_ECHOED = (
    *("instructions", "metadata", "parallel_tool_calls", "previous_response_id", "temperature", "tool_choice", "top_p"),
    *("truncation", "max_output_tokens", "text", "reasoning", "store", "user", "prompt_cache_key", "background"),
)
_SET = {"parallel_tool_calls": True, "tool_choice": "auto", "temperature": 1.0, "top_p": 1.0, "truncation": "disabled"}


async def responses(request: Request) -> Work | Response:
    got = await received(request)
    writer, fields = await _read(got), got.fields
    if not fields.flag("background"):
        return writer.work()
    if not writer.is_stored or fields.flag("stream"):
        raise ApiError(400, "background needs store: true, and no stream: GET shows the status", param="background")
    await writer.save(writer.response("queued"))
    got.gateway.responses[got.tenant.name, writer.id] = writer
    got.gateway.background.start_soon(writer.answer_alone, request.scope[ENDED].pop_all())
    return Json(writer.response("queued"))


async def _read(got: Received) -> _ResponseWriter:
    fields, gateway, tenant = got.fields, got.gateway, got.tenant
    items, choice = form.items_of(fields), form.choice_of(fields)
    instructions, previous = fields.text("instructions"), fields.text("previous_response_id")
    is_stored, is_turn = fields.flag("store", True), conversation_of(fields) is not None
    if previous is not None:
        if is_turn:
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
    asked = await got.spoken(form.messages_of_items(items, instructions), choice, how, own_format)
    response_id, session = f"resp_{secrets.token_hex(12)}", asked.session
    asked = replace(
        asked,
        session=Session(stored.kv_path(tenant, response_id)) if is_stored and not is_turn else session,
        base=Session(stored.kv_path(tenant, previous)) if previous else session,
        is_streamed=asked.is_streamed or fields.flag("background"),
    )
    about = {name: fields.body.get(name, {**_SET, **gateway.sampling}.get(name)) for name in _ECHOED}
    about |= {"store": is_stored, "metadata": fields.body.get("metadata") or {}}
    return _ResponseWriter(got, asked, response_id, items, about)


def _check_included(fields: Fields) -> None:
    """Refuse log-probabilities. All other values of `include` concern tools that this server does not have."""
    if "message.output_text.logprobs" in (fields.list("include") or ()):
        raise refused("include")


class _ResponseWriter(Writer):
    """Writer of a response. Other requests may read and end the response."""

    def __init__(
        self, received: Received, asked: Asked, response_id: str, items: list[form.Item], about: dict[str, Any]
    ) -> None:
        """`items` is the whole conversation. `about` has the fields of the request that the response repeats."""
        super().__init__(received, asked)
        self.id = response_id
        self.is_stored = about["store"]
        self._is_over = anyio.Event()
        self._items = items
        self._about = about
        self._created = int(time.time())
        self._ended_by: Ended | None = None
        """Kind of the request that ended the response, if a request did."""
        self._scope = anyio.CancelScope()
        """Scope that cancels the computation."""
        self._status = "in_progress"
        self._numbers = count()

    async def stop(self, by: Ended) -> None:
        """Stop the response; return when the part so far is stored."""
        self._ended_by = by
        self._scope.cancel()
        await self._is_over.wait()

    def response(self, status: str, error: ApiError | None = None) -> dict[str, Any]:
        """Return the response object in its current state."""
        has_ended = status in {"completed", "incomplete", "cancelled"} and self.given
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "model": self.gateway.model.name,
            "status": status,
            "error": None if error is None else stored.error_form(error.message),
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [form.item_of(block) for block in self.said[0].blocks if block.status != "in_progress"],
            "tools": [],
            "usage": form.usage(self.usage) if has_ended else None,
            **self._about,
        }

    async def save(self, response: dict[str, Any]) -> None:
        await stored.save(self.tenant, Stored(response, self._items))

    async def answer(self) -> None:
        """Receive the answer and store it."""
        self.gateway.responses[self.tenant.name, self.id] = self
        [said], is_kept = self.said, False
        try:
            with self._scope:
                await super().answer()
            self.tell(said, said.close("incomplete"))
            self._status = {"stop": "completed", "length": "incomplete", None: "cancelled"}[said.finish]
            response = self.response(self._status)
            if self.is_stored and self._ended_by != "removal":
                await self._keep(response)
                is_kept = True
            self._tell(f"response.{self._status}", response=response)
        finally:
            with anyio.CancelScope(shield=True):
                if self.is_stored and not is_kept and self.asked.prompt.turn is None:
                    await stored.remove_kv(self.tenant, self.id)
            del self.gateway.responses[self.tenant.name, self.id]
            self._is_over.set()

    async def answer_alone(self, ended: ExitStack) -> None:
        """Answer in the background, and raise nothing: an error would end the server. `ended` is closed at the end."""
        with ended:
            try:
                await self.answer()
            except Exception as error:  # noqa: BLE001 - `told` knows every kind, and the response reports it
                try:
                    await self.save(self.response("failed", error=told(error)))
                except Exception as why:  # noqa: BLE001 - the client will read that the response failed
                    log.warning("%s failed, and this could not be stored: %s", self.id, why)

    async def _keep(self, response: dict[str, Any]) -> None:
        with self.tenant.use():
            await self.save(response)
            if self.asked.prompt.turn is not None:
                return
            with suppress(sym.NotFound):  # if the file could not be saved, the log has the reason
                await sym.aio.kv_advise(stored.kv_path(self.tenant, self.id), sym.TTL(stored.KEPT_S))

    def failed(self, error: ApiError) -> bytes:
        kind, response = "response.failed", self.response("failed", error=error)
        return event({"type": kind, "sequence_number": 1 << 20, "response": response}, kind)

    def _tell(self, kind: str, **more: Any) -> None:
        if self.outlet is not None:
            self.put(event({"type": kind, "sequence_number": next(self._numbers), **more}, kind))

    def begin(self) -> None:
        for kind in ("created", "in_progress"):
            self._tell(f"response.{kind}", response=self.response("in_progress"))

    def tell(self, _said: Said, changes: Sequence[Change]) -> None:
        for kind, block, text in changes:
            where: dict[str, Any] = {"item_id": form.id_of(block), "output_index": block.index}
            if block.call is None:
                self._tell_text(kind, block, text, {**where, "content_index": 0})
            elif kind == "begins":
                self._tell_item("added", block)
            elif kind == "grows":
                self._tell("response.function_call_arguments.delta", **where, delta=text)
            else:
                whole = {"name": block.call, "arguments": block.text}
                self._tell("response.function_call_arguments.done", **where, **whole)
                self._tell_item("done", block)

    def _tell_text(self, kind: str, block: Block, text: str, where: dict[str, Any]) -> None:
        if kind == "begins":
            self._tell_item("added", block)
            self._tell("response.content_part.added", **where, part=form.text_part(""))
        elif kind == "grows":
            self._tell("response.output_text.delta", **where, delta=text, logprobs=[])
        else:
            self._tell("response.output_text.done", **where, text=block.text, logprobs=[])
            self._tell("response.content_part.done", **where, part=form.text_part(block.text))
            self._tell_item("done", block)

    def _tell_item(self, kind: str, block: Block) -> None:
        item = form.item_of(block, begins=kind == "added")
        self._tell(f"response.output_item.{kind}", output_index=block.index, item=item)

    async def whole(self) -> dict[str, Any]:
        return self.response(self._status)


async def get_response(request: Request) -> Response:
    gateway, tenant, response_id = await _about(request)
    running = gateway.responses.get((tenant.name, response_id))
    if running is not None:
        return Json(running.response("in_progress"))
    return Json((await _load(gateway, tenant, response_id)).response)


async def _load(gateway: Gateway, tenant: Tenant, response_id: str) -> Stored:
    """Load a response. A response with the status "in progress" that no writer is working on has failed."""
    found = await stored.load(tenant, response_id)
    if found.response["status"] in stored.UNDER_WAY and (tenant.name, response_id) not in gateway.responses:
        error = stored.error_form("the gateway ended before it was made")
        found.response.update({"status": "failed", "error": error})
    return found


async def get_input_items(request: Request) -> Response:
    """Return a page of a response's input items: the latest first, or with `order=asc` the oldest first."""
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
    """Remove a response. A response in flight is stopped, and leaves no files."""
    gateway, tenant, response_id = await _about(request)
    running = gateway.responses.get((tenant.name, response_id))
    if running is not None:
        await running.stop("removal")
    with tenant.use():
        try:
            await stored.remove(tenant, response_id)
        except ApiError:
            if running is None:  # a running response may not be stored yet
                raise
    return Json({"id": response_id, "object": "response", "deleted": True})


async def cancel_response(request: Request) -> Response:
    """Cancel a response; the part so far is kept."""
    gateway, tenant, response_id = await _about(request)
    running = gateway.responses.get((tenant.name, response_id))
    if running is not None:
        await running.stop("cancel")
        if not running.is_stored:
            return Json(running.response("cancelled"))
    return Json((await _load(gateway, tenant, response_id)).response)


async def _about(request: Request) -> tuple[Gateway, Tenant, str]:
    return *await asker(request), stored.checked(request.path_params["id"])


routes = [
    Route("/v1/responses", responses, methods=["POST"]),
    Route("/v1/responses/{id}", get_response, methods=["GET"]),
    Route("/v1/responses/{id}", delete_response, methods=["DELETE"]),
    Route("/v1/responses/{id}/input_items", get_input_items, methods=["GET"]),
    Route("/v1/responses/{id}/cancel", cancel_response, methods=["POST"]),
]
