"""Fields and forms that OpenAI's chat and completions share: choices, usage, the prompt, the end of a stream."""

from __future__ import annotations

import secrets
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import libsym as sym
from lips.gateway.asgi import Template, event
from lips.gateway.asked import Asked
from lips.gateway.errors import ApiError, openai_form
from lips.gateway.fields import Fields
from lips.gateway.logprobs import prompt_form
from lips.gateway.reader import Received
from lips.gateway.said import Said
from lips.gateway.sampling import prompt_top
from lips.gateway.usage import Usage
from lips.gateway.writer import Writer


def with_extras(fields: Fields, asked: Asked) -> Asked:
    """Return the record with the extras that the client wants beside the answer."""
    options = fields.child("stream_options")
    return replace(
        asked,
        wants_usage=options is not None and options.flag("include_usage"),
        wants_tokens=fields.flag("return_token_ids"),
        prompt_top=prompt_top(fields),
    )


class OpenAIWriter(Writer):
    """Writer of answers in the form of choices."""

    id_prefix: ClassVar[str]
    kinds: ClassVar[tuple[str, str]]
    """The `object` of a whole answer, and of a part of a stream."""

    def __init__(self, received: Received, asked: Asked) -> None:
        super().__init__(received, asked)
        self._id = f"{self.id_prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._templates: dict[int, Template] = {}
        """Template of the parts of each choice that have nothing but text."""

    def failed(self, error: ApiError) -> bytes:
        return event(openai_form(error)) + event("[DONE]")

    def put_choices(self, choices: Sequence[dict[str, Any]], **more: Any) -> None:
        self.put(event(self._part(choices, **more)))

    def put_text(self, said: Said, text: str) -> None:
        """Put a part of a choice that has nothing but text."""
        template = self._templates.get(said.index)
        if template is None:
            choice = {"index": said.index, **self.text_form(Template.MARK), "logprobs": None, "finish_reason": None}
            template = self._templates[said.index] = Template(self._part([choice]))
        self.put(template.filled(text))

    @property
    def is_plain(self) -> bool:
        """Whether the parts of a choice have nothing beside their text."""
        return self.asked.sampling.logprobs is None and not self.asked.wants_tokens

    @abstractmethod
    def text_form(self, text: str) -> dict[str, Any]:
        """Return the text of a part of a choice in the interface's form."""

    async def end(self) -> None:
        if self.asked.wants_usage:
            self.put_choices([], usage=usage_form(self.usage))
        self.put(event("[DONE]"))

    async def whole(self) -> dict[str, Any]:
        form = self._form(self.kinds[0], self.choices())
        return {**form, "usage": usage_form(self.usage), **await self.about_prompt()}

    @abstractmethod
    def choices(self) -> list[dict[str, Any]]:
        """Return all choices of a whole answer."""

    async def about_prompt(self) -> dict[str, Any]:
        """Return the facts of the prompt for a whole answer."""
        return {}

    def facts(self, asked: Asked, tokens: Sequence[int], dists: Sequence[sym.ReducedDist | None]) -> dict[str, Any]:
        """Return the facts of a prompt that the client has asked for."""
        found: dict[str, Any] = {"prompt_token_ids": list(tokens)} if asked.wants_tokens else {}
        if asked.prompt_top is not None:
            found["prompt_logprobs"] = prompt_form(tokens, dists, self.gateway.vocabulary, asked.prompt_top)
        return found

    def _part(self, choices: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
        told = {"usage": None} if self.asked.wants_usage else {}
        return {**self._form(self.kinds[1], choices), **told, **more}

    def _form(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self._id, "object": kind, "created": self._created, "model": self.gateway.model.name}
        return {**head, "choices": choices}


def usage_form(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.num_prompt,
        "completion_tokens": usage.num_completion,
        "total_tokens": usage.num_prompt + usage.num_completion,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached},
    }
