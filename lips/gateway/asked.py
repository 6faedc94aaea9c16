"""The record of a request, the same for all interfaces."""

from __future__ import annotations

from dataclasses import dataclass

from lips.gateway.prompts import Prompt
from lips.gateway.sampling import Sampling
from lips.gateway.tenants import Session
from lips.gateway.tools import NO_TOOLS, ToolChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request: its prompt, the settings of its answers, and the extras that its client wants.

    Each interface makes this record from its JSON, and the engine answers it.
    """

    prompt: Prompt
    sampling: Sampling
    choice: ToolChoice = NO_TOOLS
    session: Session | None = None
    """Conversation of the request. At the end, its file has the request and the answer."""
    base: Session | None = None
    """Session whose file may have a prefix of the prompt. None: use the file of `session`."""
    deadline_s: float | None = None
    is_streamed: bool = False
    """Whether the client gets the answer piece by piece. False: the client gets the whole answer at once."""
    echo: str | None = None
    """Text that the client gets before the answer: the prompt, or the message that the answer continues."""
    wants_usage: bool = False
    """Whether the end of a stream has the usage."""
    wants_tokens: bool = False
    """Whether the client also gets the token ids."""
    prompt_top: int | None = None
    """Number of the likeliest tokens that the client gets beside each token of the prompt."""
