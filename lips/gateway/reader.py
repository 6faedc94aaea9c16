"""Reader of requests, for the parts that all interfaces share: tenant, fields, messages and settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request

from lips.gateway.asked import Asked
from lips.gateway.constraints import Named, bounded
from lips.gateway.fields import Fields
from lips.gateway.gateway import Gateway
from lips.gateway.names import conversation_of, session_for
from lips.gateway.prompts import ChatMessage, Prompt
from lips.gateway.sampling import Sampling
from lips.gateway.tenants import Tenant
from lips.gateway.tools import NO_TOOLS, ToolChoice


@dataclass(frozen=True, slots=True)
class Received:
    """A request with its tenant and its checked fields."""

    request: Request
    gateway: Gateway
    tenant: Tenant
    fields: Fields

    def asked(self, prompt: Prompt, sampling: Sampling, choice: ToolChoice = NO_TOOLS) -> Asked:
        """Return the request's record for a finished prompt."""
        return Asked(
            prompt=prompt,
            sampling=sampling,
            choice=choice,
            session=session_for(self.tenant, self.request, self.fields),
            deadline_s=self.gateway.settings.answer_s,
            is_streamed=self.fields.flag("stream"),
        )

    async def spoken(
        self, messages: Sequence[ChatMessage], choice: ToolChoice, sampling: Sampling, own_format: Named | None
    ) -> Asked:
        """Return the request's record for messages: a whole conversation, or the next turn of a stored conversation."""
        gateway, fields = self.gateway, self.fields
        sampling = bounded(fields, sampling, gateway.model, own_format)
        is_turn, room = conversation_of(fields) is not None, gateway.room(sampling)
        prompt = await gateway.prompts.prompt(fields, messages, choice.tools, is_turn=is_turn, room=room)
        return self.asked(prompt, sampling, choice)


async def asker(request: Request) -> tuple[Gateway, Tenant]:
    """Return the gateway and the tenant of a request. ApiError: the request has no valid key or account."""
    gateway: Gateway = request.app.state.gateway
    return gateway, await gateway.tenant_of(request)


async def received(request: Request) -> Received:
    """Read a request. ApiError: the request is refused."""
    gateway, tenant = await asker(request)
    return Received(request, gateway, tenant, await gateway.fields_of(request, tenant))
