"""Fields of requests, by route: the fields that are obeyed, accepted without effect, or refused.

A path names a field with all of its inner fields. `tools[](function|).name` is the name in an element of a list whose
`type` is function or missing; `(*)` stands for all other types. `n=1` means that the value 1 is allowed: it changes
nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from urllib.parse import quote

from lips.gateway.errors import ApiError
from lips.gateway.fields import Fields

MAX_NAMED = 16
"""Maximum number of ignored fields that a header names; further fields are counted."""
_MAX_NAME_CHARS = 64
_MAX_GUESSED = 64
"""Maximum number of unknown names in a request that are compared with known names, which takes up to 10 ms."""
_LEAST_GUESSED_CHARS = 4
_NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})
"""Values that ask for nothing: refused fields may have them, unless their path lists other values."""


class Column(Enum):
    """Treatment of a field."""

    OBEYED = "obeyed"
    ACCEPTED = "accepted without effect"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The paths of one interface, or of a part that several interfaces share."""

    obeyed: str = ""
    accepted: str = ""
    refused: str = ""

    def of(self, column: Column) -> list[str]:
        return {Column.OBEYED: self.obeyed, Column.ACCEPTED: self.accepted, Column.REFUSED: self.refused}[
            column
        ].split()


ALL = Columns(
    obeyed="""
    model stream temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty logit_bias seed
    max_tokens max_completion_tokens n_predict min_tokens stop stop_token_ids ignore_eos include_stop_str_in_output
    bad_words allowed_token_ids skip_special_tokens truncate_prompt_tokens truncation_side
    guided_json guided_choice guided_regex guided_grammar grammar json_schema
    structured_outputs.json structured_outputs.regex structured_outputs.choice structured_outputs.grammar
    structured_outputs.json_object conversation session_id prompt_cache_key
    typical_p repeat_penalty repeat_last_n mirostat mirostat_tau mirostat_eta
    dry_multiplier dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers
    """,
    accepted="""
    store metadata user service_tier safety_identifier cache_control cache_prompt cache_salt
    prompt_cache_options prompt_cache_retention priority request_id verbosity reasoning reasoning_effort
    reasoning_format reasoning_control reasoning_budget_tokens reasoning_budget_message reasoning_budget_start_tag
    reasoning_budget_end_tag reasoning_budget_end_tags thinking thinking_token_budget thinking_budget_tokens
    include_reasoning context_management guided_decoding_backend structured_outputs.disable_any_whitespace
    stream_options.include_obfuscation stream_options.continuous_usage_stats stream_interval sse_ping_interval
    timings_per_token verbose return_progress return_token_offsets return_weight_versions return_mm_kwargs
    routed_experts_prompt_start response_fields backend_sampling id_slot n_keep n_discard n_cache_reuse
    xtc_threshold dynatemp_exponent adaptive_decay length_penalty spaces_between_special_tokens
    kv_transfer_params ec_transfer_params media_io_kwargs mm_processor_kwargs
    """,
    refused="""
    top_n_sigma=0,-1 xtc_probability dynatemp_range adaptive_target=0,-1 min_keep=0,1 samplers lora n_cmpl=1 n_indent
    t_max_predict_ms=0,-1 n_probs post_sampling_probs return_tokens grammar_lazy grammar_triggers preserved_tokens
    chat_format chat_parser generation_prompt parse_tool_calls=true use_beam_search repetition_detection
    logprob_token_ids watermarking vllm_xargs guided_whitespace_pattern structured_outputs.whitespace_pattern
    structured_outputs.structural_tag structured_outputs.disable_additional_properties return_tokens_as_token_ids
    mm_payload moderation documents chat_template
    """,
)
FORMAT = Columns(
    obeyed="""
    response_format(text|json_object|json_schema|).type response_format(json_schema|).json_schema.schema
    """,
    accepted="""
    response_format(text|json_object).json_schema
    response_format(json_schema|).json_schema.name response_format(json_schema|).json_schema.description
    response_format(json_schema|).json_schema.strict
    """,
    refused="response_format(structural_tag)",
)
SPOKEN = Columns(
    obeyed="add_generation_prompt continue_final_message chat_template_kwargs parallel_tool_calls",
    refused="add_special_tokens return_prompt_text",
)
OPENAI = Columns(obeyed="n stream_options.include_usage logprobs return_token_ids prompt_logprobs echo")
CHAT = Columns(
    obeyed="""
    messages[].role messages[].content(text|input_text|output_text|).type
    messages[].content(text|input_text|output_text|).text messages[].content(refusal).type
    messages[].content(refusal).refusal messages[].refusal messages[].name messages[].tool_call_id
    messages[].tool_calls[](function|).id messages[].tool_calls[](function|).type
    messages[].tool_calls[](function|).function.name messages[].tool_calls[](function|).function.arguments
    tools[](function|).type tools[](function|).function.name tools[](function|).function.description
    tools[](function|).function.parameters tool_choice(function|).type tool_choice(function|).function.name
    tool_choice(function|).name
    tool_choice(allowed_tools).type tool_choice(allowed_tools).allowed_tools top_logprobs
    """,
    accepted="""
    messages[].content(text|).prompt_cache_breakpoint messages[].reasoning messages[].reasoning_content
    messages[].annotations messages[].tool_calls[](function|).index tools[](function|).function.strict
    tools[](function|).function.defer_loading tools[](function|).defer_loading prediction
    """,
    refused="""
    messages[].content(*) messages[].audio messages[].function_call messages[].tool_calls[](*) tools[](*)
    tool_choice(*) functions function_call="none","auto" modalities=["text"] audio web_search_options
    """,
)
COMPLETIONS = Columns(
    obeyed="prompt best_of",
    refused="suffix add_special_tokens=true prompt_embeds continue_final_message",
)
RESPONSES = Columns(
    obeyed="""
    input[](message|).type input[](message|).role
    input[](message|).content(input_text|output_text|text|summary_text|).type
    input[](message|).content(input_text|output_text|text|summary_text|).text
    input[](message|).content(refusal).type input[](message|).content(refusal).refusal
    input[](function_call).type input[](function_call).name input[](function_call).arguments
    input[](function_call).call_id input[](function_call_output).type input[](function_call_output).call_id
    input[](function_call_output).output(input_text|output_text|text|).type
    input[](function_call_output).output(input_text|output_text|text|).text
    instructions max_output_tokens previous_response_id conversation.id background store tools[](function).type
    tools[](function).name tools[](function).description tools[](function).parameters
    tool_choice(function).type tool_choice(function).name tool_choice(allowed_tools).type
    tool_choice(allowed_tools).mode tool_choice(allowed_tools).tools
    text.format(text|json_object|json_schema|).type text.format(json_schema|).schema
    """,
    accepted="""
    input[](message|).id input[](message|).status input[](message|).phase
    input[](message|).content(input_text|output_text|text|summary_text|).prompt_cache_breakpoint
    input[](message|).content(output_text).annotations input[](message|).content(output_text).logprobs
    input[](function_call).id input[](function_call).status input[](function_call).caller
    input[](function_call).namespace input[](function_call).async input[](function_call_output).id
    input[](function_call_output).status input[](function_call_output).caller input[](function_call_output).name
    input[](function_call_output).namespace input[](function_call_output).output(input_text).prompt_cache_breakpoint
    input[](*) tools[](*) tools[](function).strict tools[](function).defer_loading tools[](function).async
    tools[](function).allowed_callers tools[](function).output_schema include max_tool_calls truncation
    text.verbosity text.format(json_schema|).name text.format(json_schema|).description
    text.format(json_schema|).strict stream_options.include_usage background_options image access_programs
    """,
    refused="""
    input[](message|).content(*) input[](function_call_output).output(*) input[](item_reference)
    tool_choice(*) prompt top_logprobs n=1 echo logprobs enable_response_messages previous_input_messages
    previous_response
    """,
)
MESSAGES = Columns(
    obeyed="""
    messages[].role messages[].content(text).type messages[].content(text).text messages[].content(tool_use).type
    messages[].content(tool_use).id messages[].content(tool_use).name messages[].content(tool_use).input
    messages[].content(tool_result).type messages[].content(tool_result).tool_use_id
    messages[].content(tool_result).content(text|).type messages[].content(tool_result).content(text|).text
    system(text|).type system(text|).text tools[](custom|).type tools[](custom|).name tools[](custom|).description
    tools[](custom|).input_schema tool_choice(auto|any|tool|none|).type tool_choice(tool|).name
    tool_choice(auto|any|tool|none|).disable_parallel_tool_use
    """,
    accepted="""
    messages[].clear_at messages[].output_config messages[].content(text).cache_control
    messages[].content(text).citations messages[].content(tool_use).cache_control messages[].content(tool_use).caller
    messages[].content(tool_use).toolset_name messages[].content(tool_result).cache_control
    messages[].content(tool_result).is_error messages[].content(tool_result).toolset_name
    messages[].content(tool_result).content(text|).cache_control
    messages[].content(tool_result).content(text|).citations
    messages[].content(thinking) messages[].content(redacted_thinking) system(text|).cache_control
    system(text|).citations tools[](custom|).cache_control tools[](custom|).strict tools[](custom|).defer_loading
    tools[](custom|).allowed_callers tools[](custom|).eager_input_streaming tools[](custom|).input_examples tools[](*)
    betas billing_policy cache_control compaction context_management metadata speed thinking user_profile_id
    workspace_id
    """,
    refused="""
    messages[].content(*) messages[].content(tool_result).content(*) system(*) mcp_servers mm_payload
    """,
)
ASKED = Columns(
    obeyed="stop_sequences output_config.format(json_schema|).type output_config.format(json_schema|).schema",
    accepted="""
    stream_options.include_usage output_config.effort output_config.task_budget diagnostics
    fallback_credit_token fallbacks inference_geo
    """,
    refused="container thread n=1 echo logprobs",
)
COUNTED = Columns(
    obeyed="model chat_template_kwargs",
    accepted="output_config return_mm_kwargs",
)
OLLAMA = Columns(
    obeyed="""
    model stream format session_id options.temperature options.top_p options.top_k options.min_p options.typical_p
    options.seed options.stop options.num_predict options.repeat_penalty options.repeat_last_n
    options.presence_penalty options.frequency_penalty options.mirostat options.mirostat_tau options.mirostat_eta
    """,
    accepted="""
    keep_alive think truncate shift options.num_ctx options.num_batch options.num_gpu options.main_gpu
    options.num_thread options.num_keep options.low_vram options.f16_kv options.numa options.use_mmap
    options.use_mlock options.logits_all options.vocab_only options.embedding_only
    """,
    refused="logprobs top_logprobs template options.tfs_z=1 options.penalize_newline=true",
)
OLLAMA_CHAT = Columns(
    obeyed="""
    messages[].role messages[].content messages[].tool_name messages[].name messages[].tool_call_id
    messages[].tool_calls[].id messages[].tool_calls[].function.name messages[].tool_calls[].function.arguments
    tools[](function|).type tools[](function|).function.name tools[](function|).function.description
    tools[](function|).function.parameters
    """,
    accepted="messages[].thinking messages[].tool_calls[].type messages[].tool_calls[].function.index",
    refused="messages[].images tools[](*)",
)
OLLAMA_GENERATE = Columns(
    obeyed="prompt system context raw",
    refused="suffix images width height steps",
)
PARTS = {
    "Where text is generated": ALL,
    "Formats of OpenAI's chat and completions": FORMAT,
    "Where messages become a prompt": SPOKEN,
    "Chat and completions": OPENAI,
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
    "/v1/messages and /v1/messages/count_tokens": MESSAGES,
    "/v1/messages": ASKED,
    "/v1/messages/count_tokens": COUNTED,
    "/api/chat and /api/generate": OLLAMA,
    "/api/chat": OLLAMA_CHAT,
    "/api/generate": OLLAMA_GENERATE,
}
"""Columns by their titles in the manual."""
ROUTES: dict[str, tuple[Columns, ...]] = {
    "/v1/chat/completions": (ALL, FORMAT, SPOKEN, OPENAI, CHAT),
    "/v1/completions": (ALL, FORMAT, OPENAI, COMPLETIONS),
    "/v1/responses": (ALL, SPOKEN, RESPONSES),
    "/v1/messages": (ALL, SPOKEN, MESSAGES, ASKED),
    "/v1/messages/count_tokens": (MESSAGES, COUNTED),
    "/api/chat": (OLLAMA, OLLAMA_CHAT),
    "/api/generate": (OLLAMA, OLLAMA_GENERATE),
}


@dataclass(slots=True)
class SchemaField:
    """A field of a schema."""

    column: Column | None = None
    """Column of the field. For a field with inner fields: the first of their columns, in the order of `Column`."""
    neutral: tuple[Any, ...] = _NOTHING
    children: dict[str, SchemaField] = field(default_factory=dict)
    kinds: dict[str, SchemaField] = field(default_factory=dict)
    """Nodes by `type`, for a field that takes objects of several types; "" is for objects without a type."""

    @property
    def is_leaf(self) -> bool:
        """Whether the table lists no inner fields of the field."""
        return not self.children and not self.kinds

    def of_type(self, name: object) -> SchemaField | None:
        """Return the node for objects of a type; None: there is no such node."""
        if not self.kinds:
            return self
        return self.kinds.get(name if isinstance(name, str) else "") or self.kinds.get("*")


_STEP = re.compile(r"([^.\[\](]+)(?:\[\])?(?:\(([^)]*)\))?\.?")
"""Step of a path: a name, whether the field is a list, and the types that its objects may have."""


def _tree(parts: Iterable[Columns]) -> SchemaField:
    root = SchemaField()
    for part in parts:
        for column in Column:
            for entry in part.of(column):
                path, _, neutral = entry.partition("=")
                for node in _places(root, path):
                    node.column = column
                    node.neutral = (None, *json.loads(f"[{neutral}]")) if neutral else _NOTHING
    _fill(root)
    return root


def _fill(node: SchemaField) -> Column | None:
    inner = [_fill(each) for each in (*node.children.values(), *node.kinds.values())]
    node.column = node.column or next((column for column in Column if column in inner), None)
    return node.column


def _places(root: SchemaField, path: str) -> list[SchemaField]:
    """Return the nodes that a path of the table names, one for each type in the path. Make nodes that are missing."""
    found = [root]
    for name, kinds in _STEP.findall(path):
        found = [node.children.setdefault(name, SchemaField()) for node in found]
        if f"{name}(" in path or f"{name}[](" in path:
            found = [node.kinds.setdefault(kind, SchemaField()) for node in found for kind in kinds.split("|")]
    return found


def _names(node: SchemaField) -> Iterator[str]:
    yield from node.children
    for inner in (*node.children.values(), *node.kinds.values()):
        yield from _names(inner)


TREES = {route: _tree(parts) for route, parts in ROUTES.items()}
_NAMES = frozenset(name for tree in TREES.values() for name in _names(tree))
"""Field names of all interfaces. None of them is treated as a typing error."""


@dataclass(slots=True)
class Ignored:
    """Fields of one request that have no effect."""

    paths: dict[str, None] = field(default_factory=dict)
    """Paths for the header, in order of appearance."""
    num_more: int = 0
    unknown: list[str] = field(default_factory=list)
    """The paths in `paths` that no interface has."""
    num_guessed: int = 0

    def add(self, path: str, *, is_known: bool) -> None:
        if path in self.paths:
            return
        if len(self.paths) >= MAX_NAMED:
            self.num_more += 1
            return
        self.paths[path] = None
        if not is_known:
            self.unknown.append(path)

    @property
    def header(self) -> str:
        """The header's value: ASCII, about a kilobyte at most."""
        names = [shown(path) for path in self.paths]
        return ", ".join([*names, f"and {self.num_more} more"] if self.num_more else names)


def shown(path: str) -> str:
    """Return a path from a client in a form that is safe in a header or a log."""
    text = quote(path, safe="[]().*$ ", errors="replace")
    return text if len(text) <= _MAX_NAME_CHARS else f"{text[:_MAX_NAME_CHARS]}..."


def check(route: str, body: dict[str, Any], *, is_strict: bool = False) -> Ignored:
    """Refuse a body with an unsupported field that would change the answer; return the fields without effect.

    `is_strict`: refuse unknown fields, too.
    """
    ignored = Ignored()
    if (tree := TREES.get(route)) is not None:
        _check_object(tree, body, "", ignored, is_strict=is_strict)
    return ignored


def _check_object(node: SchemaField, given: dict[str, Any], where: str, ignored: Ignored, *, is_strict: bool) -> None:
    for name, value in given.items():
        child = node.children.get(name)
        if child is None:
            _check_unknown(node, f"{where}{name}", name, ignored, is_strict=is_strict)
        elif value is not None:
            _check_value(child, value, f"{where}{name}", ignored, is_strict=is_strict)


def _check_value(node: SchemaField, value: Any, path: str, ignored: Ignored, *, is_strict: bool) -> None:
    if node.is_leaf:
        if node.column is Column.ACCEPTED:
            ignored.add(path, is_known=True)
        elif node.column is Column.REFUSED and not any(_is_same(value, each) for each in node.neutral):
            raise refused(path)
    elif isinstance(value, list):
        for each in value:
            if isinstance(each, dict):
                _check_typed(node, each, f"{path}[]", ignored, is_strict=is_strict)
    elif isinstance(value, dict):
        _check_typed(node, value, path, ignored, is_strict=is_strict)
    elif node.column is Column.ACCEPTED:
        ignored.add(path, is_known=True)


def _check_typed(node: SchemaField, given: dict[str, Any], path: str, ignored: Ignored, *, is_strict: bool) -> None:
    kind = given.get("type")
    if node.kinds and not isinstance(kind, (str, type(None))):
        raise Fields(given, f"{path}.").wrong("type", "a text")
    inner = node.of_type(kind)
    if inner is None:
        return  # the reader of the field refuses the type
    if inner.is_leaf:
        _check_value(inner, given or {"type": kind}, f"{path}({kind})", ignored, is_strict=is_strict)
    else:
        _check_object(inner, given, f"{path}.", ignored, is_strict=is_strict)


def _check_unknown(node: SchemaField, path: str, name: str, ignored: Ignored, *, is_strict: bool) -> None:
    if is_strict:
        raise ApiError(400, f"{shown(path)} is no field of this request", param=shown(path), code="unknown_parameter")
    if name not in _NAMES and ignored.num_guessed < _MAX_GUESSED:
        ignored.num_guessed += 1
        if (meant := next((each for each in node.children if is_near(name, each)), None)) is not None:
            raise ApiError(
                400, f"{shown(path)} is no field: is {meant} meant?", param=shown(path), code="unknown_parameter"
            )
    ignored.add(path, is_known=False)


def refused(path: str) -> ApiError:
    said = shown(path)
    return ApiError(
        400, f"{said} is not done by this server, and would change the answer", param=said, code="unsupported_parameter"
    )


def _is_same(value: Any, other: Any) -> bool:
    """Compare values as JSON does: 1 equals 1.0, but not true."""
    return isinstance(value, bool) is isinstance(other, bool) and bool(value == other)


def is_near(name: str, known: str) -> bool:
    """Return whether two names differ by one letter (added, removed or replaced) or by two swapped neighbours."""
    if abs(len(name) - len(known)) > 1 or len(known) < _LEAST_GUESSED_CHARS:
        return False
    at = next((at for at, (one, other) in enumerate(zip(name, known, strict=False)) if one != other), None)
    if at is None:
        return name != known
    rest, wanted = name[at:], known[at:]
    swapped = rest[1:2] + rest[:1] == wanted[:2] and rest[2:] == wanted[2:]
    return rest[1:] == wanted[1:] or rest[1:] == wanted or rest == wanted[1:] or swapped


def column_of(route: str, path: str) -> Column | None:
    """Return the column of a field, or None. `path` may name types of objects, as the paths of the table do."""
    nodes, here = [TREES[route]], list[SchemaField]()
    for name, kind in _STEP.findall(path):
        here = [inner for node in nodes if (inner := node.children.get(name)) is not None]
        if not here:  # an object of any type
            return next((node.column for node in nodes if node.is_leaf), None)
        if here[0].is_leaf:
            return here[0].column
        nodes = [inner for node in here for inner in _of_kind(node, kind)]
        if kind and nodes and nodes[0].is_leaf:
            return nodes[0].column
    return here[0].column


def _of_kind(node: SchemaField, kind: str) -> list[SchemaField]:
    """Return the node of one type, or the nodes of all types if the path names no type."""
    if not node.kinds:
        return [node]
    if kind:
        return [found] if (found := node.of_type(kind)) is not None else []
    return [*node.kinds.values()][::-1]  # general types before special types
