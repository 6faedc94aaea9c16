"""Chat templates: the Jinja programs in checkpoints that turn messages into a prompt.

The daemon runs the template that comes with a model. So the template runs in Jinja's immutable sandbox, and sees only
plain JSON data. Checkpoints are written for `apply_chat_template` in transformers. So templates get the same names and
the same rules for whitespace here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from libsym.errors import Invalid

DEFAULT_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Template of the tiny model, which has no checkpoint with a template."""


class ChatTemplate:
    """A chat template, and the special tokens that the template may name. The first use compiles the template."""

    __slots__ = ("_compiled", "_source", "_special_tokens")

    def __init__(self, source: str | None, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)  # "bos_token": "<s>", …
        self._compiled: jinja2.Template | None = None

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        add_generation_prompt: bool,
        now: datetime | None = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Return the prompt for these messages. Invalid: the template raises an error.

        `now` replaces the local time for a template that asks for the date. `variables` are further names for the
        template.
        """
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise Invalid("a conversation is a list of messages, each a dict with 'role' and 'content'")
        if tools is not None and not isinstance(tools, list):
            raise Invalid(f"tools are a list of JSON schemas, not a {type(tools).__name__}")
        own = {
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            "strftime_now": (now or local_time()).strftime,
            **self._special_tokens,
        }
        if taken := variables.keys() & own.keys():
            raise Invalid(f"{min(taken)} cannot be given as a variable: the chat template gets it from Symphony")
        try:
            return self._template().render({**variables, **own})
        except Invalid:
            raise
        except Exception as error:  # a template is a program: it can raise any exception
            reason = " ".join(str(error).split())[:200]
            raise Invalid(
                f"the model's chat template refused the messages: {reason or type(error).__name__}"
            ) from error

    def _template(self) -> jinja2.Template:
        if self._source is None:
            raise Invalid("the model has no chat template (it is not a chat model): write the prompt as text")
        if self._compiled is None:
            try:
                self._compiled = _environment().from_string(self._source)
            except jinja2.TemplateSyntaxError as error:
                raise Invalid(f"the model's chat template is broken at line {error.lineno}: {error.message}") from error
        return self._compiled


class _GenerationBlock(Extension):
    """Jinja block `{% generation %}…{% endgeneration %}`, which renders its contents.

    The block marks the assistant's words for training.
    """

    tags = {"generation"}  # noqa: RUF012 - declared so by Jinja

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON. Jinja's own filter escapes HTML, but no model was trained on escaped texts."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def local_time() -> datetime:
    return datetime.now()  # noqa: DTZ005 - the local date is what templates ask for


def special_token_text(value: object) -> str | None:
    """Return the text of a special token in `tokenizer_config.json`: a string, or an object with its content."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def default_template(value: object) -> str | None:
    """Return the template in `chat_template` of `tokenizer_config.json`.

    The value is a template, or a list of named templates. Of a list, the template named `default` is returned.
    """
    if isinstance(value, Sequence) and not isinstance(value, str):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, Mapping)}
        value = named.get("default")
    return value if isinstance(value, str) else None
