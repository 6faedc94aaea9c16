#!/usr/bin/env python3
"""Lists the request fields that clients of OpenAI, Anthropic and Ollama, vLLM and llama.cpp know.

The fields of openai, anthropic and ollama are read from the installed packages. The fields of the servers are read from
their sources. The list is `tests/lips/gateway/request_fields.json`: server, route, object, names of its fields.
`[]` stands for an element of a list. `(kind)` stands for an object of that `type`, where several types are possible.

    .venv/bin/python scripts/conformance/request_fields.py --vllm ~/vllm/vllm --llama ~/llama.cpp/tools/server
    .venv/bin/python scripts/conformance/request_fields.py --quick     # the packages alone, compared with the list
    .venv/bin/python scripts/conformance/request_fields.py --manual    # for lips-gateway-fields(7)
    .venv/bin/python scripts/conformance/request_fields.py --table 0.1.0=http://127.0.0.1:8831    # what changed
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import importlib.metadata
import json
import re
import sys
import types
import typing
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECORD = Path(__file__).resolve().parents[2] / "tests" / "lips" / "gateway" / "request_fields.json"
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
OLLAMA_CHAT, OLLAMA_GENERATE = "/api/chat", "/api/generate"
PACKAGES: dict[str, dict[str, tuple[str, ...]]] = {
    "openai": {
        CHAT: ("openai.types.chat.completion_create_params:CompletionCreateParams",),
        COMPLETIONS: ("openai.types.completion_create_params:CompletionCreateParams",),
        RESPONSES: ("openai.types.responses.response_create_params:ResponseCreateParams",),
    },
    "anthropic": {
        MESSAGES: (
            "anthropic.types.message_create_params:MessageCreateParams",
            "anthropic.types.beta.message_create_params:MessageCreateParams",
        ),
        COUNT: (
            "anthropic.types.message_count_tokens_params:MessageCountTokensParams",
            "anthropic.types.beta.message_count_tokens_params:MessageCountTokensParams",
        ),
    },
    "ollama": {
        OLLAMA_CHAT: ("ollama._types:ChatRequest",),
        OLLAMA_GENERATE: ("ollama._types:GenerateRequest",),
    },
}
VLLM = {
    CHAT: "ChatCompletionRequest",
    COMPLETIONS: "CompletionRequest",
    RESPONSES: "ResponsesRequest",
    MESSAGES: "AnthropicMessagesRequest",
    COUNT: "AnthropicCountTokensRequest",
}
VLLM_OLD = {
    CHAT: "guided_json guided_regex guided_choice guided_grammar guided_decoding_backend guided_whitespace_pattern",
    COMPLETIONS: "guided_json guided_regex guided_choice guided_grammar guided_decoding_backend "
    "guided_whitespace_pattern best_of",
}
"""Fields of vLLM before 0.12, which clients still send."""
LLAMA = {
    CHAT: ("server-common.cpp", "oaicompat_chat_params_parse"),
    COMPLETIONS: ("server-common.cpp", "oaicompat_completion_params_parse"),
    RESPONSES: ("server-chat.cpp", "server_chat_convert_responses_to_chatcmpl"),
    MESSAGES: ("server-chat.cpp", "server_chat_convert_anthropic_to_oai"),
}
SHORT = {
    CHAT: "chat",
    COMPLETIONS: "completions",
    RESPONSES: "responses",
    MESSAGES: "messages",
    COUNT: "count_tokens",
    OLLAMA_CHAT: "api/chat",
    OLLAMA_GENERATE: "api/generate",
}
WRONG = ({"wrong": 1}, [[1]], "\0", -7)
"""Wrong values. Each parameter refuses at least one of them."""
RIGHT = (True, 1, "auto", ["x"], [1], {"type": "text"}, {"5": 1})
"""Right values. Most parameters accept at least one of them."""
SAID = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
LEAST: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Hi", "max_tokens": 1},
    RESPONSES: {"input": "Hi", "max_output_tokens": 1},
}
"""The fewest fields that a request needs, by route. Other routes need `SAID`."""
TOOL = {"name": "f", "description": "f", "parameters": {"type": "object"}, "input_schema": {"type": "object"}}
TOOLS = [{"type": "custom", **TOOL}], [{"type": "function", **TOOL}], [{"type": "function", "function": TOOL}]
BESIDE: dict[str, dict[str, Any]] = {"top_logprobs": {"logprobs": True}}
"""Further parameters that a request needs beside a parameter, by the name of that parameter."""
HEAD = """\
Parameters at the top level of requests, the servers that know them, and what the gateway does of them, before and now.

now      The column of lips-gateway-fields(7), which tests/lips/gateway/test_request_fields.py proves: obeyed, accepted
         (without effect, and named in the answer's header), refused with status 400.
before   The gateway of {name}, asked for each parameter with values that are wrong for it and values
         that are right for most. obeyed: a wrong one is refused by the parameter's name, and a right one is taken.
         refused: each is refused by that name. ignored: none is, and nothing tells the client. no route: status 404.

"""
Fields = dict[str, dict[str, dict[str, str]]]
"""Names of fields by server, route and object, separated by spaces."""


@dataclass(frozen=True)
class Shape:
    """An object of a schema: the names of its fields, each with the objects that it accepts."""

    name: str
    kinds: tuple[str, ...]
    """Possible values of the object's `type`."""
    fields: dict[str, list[Place]]


@dataclass(frozen=True)
class Place:
    """Place where an object can stand: a field, or a list in a field."""

    is_list: bool
    shape: Any
    """Argument for `shape_of`."""


class Listed:
    """Collector of the paths of one schema's fields. `shape_of` turns a place's `shape` into a Shape."""

    def __init__(self, shape_of: typing.Callable[[Any], Shape]) -> None:
        self._shape_of = shape_of
        self.paths: set[str] = set()

    def add(self, prefix: str, shape: Shape, above: tuple[str, ...] = ()) -> None:
        for name, places in shape.fields.items():
            path = f"{prefix}{name}"
            self.paths.add(path)
            shapes = [(each.is_list, self._shape_of(each.shape)) for each in places]
            several = len({shape.name for _, shape in shapes}) > 1
            for is_list, inner in shapes:
                if inner.name in above:
                    continue
                where = path + ("[]" if is_list else "")
                kinds = [f"({kind})" for kind in inner.kinds] if several and inner.kinds else [""]
                for kind in kinds:
                    self.add(f"{where}{kind}.", inner, (*above, inner.name))


@functools.cache
def typed_shape(kind: Any) -> Shape:
    """Return the shape of a TypedDict or a pydantic model, as the clients' packages use them."""
    models = getattr(kind, "model_fields", {})
    hints = {field.alias or name: field.annotation for name, field in models.items()}
    hints = hints or _dicts().get_type_hints(kind, include_extras=True)
    fields = {}
    kinds: tuple[str, ...] = ()
    for name, hint in hints.items():
        alias = next((each.alias for each in _annotations(hint) if getattr(each, "alias", None)), name)
        if alias.startswith("anthropic-"):
            continue  # a header
        fields[alias] = [Place(is_list, found) for is_list, found in _objects(hint, is_list=False)]
        if alias == "type":
            kinds = tuple(text for text in _literals(hint) if isinstance(text, str))
    return Shape(f"{kind.__module__}.{kind.__name__}", kinds, fields)


def _dicts() -> Any:
    """Return the module whose TypedDicts the clients' packages use. They depend on it."""
    return importlib.import_module("typing_extensions")


def _is_object(hint: Any) -> bool:
    return bool(_dicts().is_typeddict(hint)) or hasattr(hint, "model_fields")


def _annotations(hint: Any) -> Iterator[Any]:
    if typing.get_origin(hint) is typing.Annotated:
        yield from hint.__metadata__
    for inner in typing.get_args(hint)[:1]:
        yield from _annotations(inner)


def _literals(hint: Any) -> Iterator[Any]:
    if typing.get_origin(hint) is typing.Literal:
        yield from typing.get_args(hint)
        return
    for inner in typing.get_args(hint):
        yield from _literals(inner)


def _objects(hint: Any, *, is_list: bool) -> Iterator[tuple[bool, Any]]:
    """Yield the objects of an annotation, and whether each is in a list."""
    origin = typing.get_origin(hint)
    if _is_object(hint):
        yield is_list, hint
    elif origin in (typing.Union, types.UnionType) or origin in (typing.Required, typing.NotRequired):
        for inner in typing.get_args(hint):
            yield from _objects(inner, is_list=is_list)
    elif origin is typing.Annotated:
        yield from _objects(typing.get_args(hint)[0], is_list=is_list)
    elif isinstance(origin, type) and issubclass(origin, Iterable) and origin is not dict:
        for inner in typing.get_args(hint):
            yield from _objects(inner, is_list=True)


def of_package(name: str) -> dict[str, list[str]]:
    """Return the paths of an installed package's fields, by route."""
    found = {}
    for route, places in PACKAGES[name].items():
        listed = Listed(typed_shape)
        for place in places:
            module, _, attribute = place.partition(":")
            hint = getattr(importlib.import_module(module), attribute)
            for kind in [hint] if _is_object(hint) else typing.get_args(hint):
                listed.add("", typed_shape(kind))
        found[route] = sorted(listed.paths)
    return found


class Pydantic:
    """Classes with annotated fields in Python sources. The sources are parsed, not run."""

    def __init__(self, sources: Iterable[Path]) -> None:
        self._classes: dict[str, ast.ClassDef] = {}
        self._aliases: dict[str, ast.expr] = {}
        for source in sources:
            for node in ast.parse(source.read_text()).body:
                if isinstance(node, ast.ClassDef):
                    self._classes.setdefault(node.name, node)
                elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
                    self._aliases.setdefault(node.target.id, node.value)

    def shape_of(self, name: str) -> Shape:
        node = self._classes[name]
        fields, kinds = dict[str, list[Place]](), tuple[str, ...]()
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id in self._classes:
                fields |= self.shape_of(base.id).fields
        for each in node.body:
            if not isinstance(each, ast.AnnAssign) or not isinstance(each.target, ast.Name):
                continue
            field = each.target.id
            if field.startswith("_") or "ClassVar" in ast.dump(each.annotation):
                continue
            if field == "type":
                kinds = tuple(
                    node.value
                    for node in ast.walk(each.annotation)
                    if isinstance(node, ast.Constant) and isinstance(node.value, str)
                )
            fields[self._alias(each) or field] = list(self._places(each.annotation, is_list=False))
        return Shape(name, kinds, fields)

    @staticmethod
    def _alias(node: ast.AnnAssign) -> str | None:
        if isinstance(node.value, ast.Call):
            for keyword in node.value.keywords:
                if keyword.arg == "alias" and isinstance(keyword.value, ast.Constant):
                    return str(keyword.value.value)
        return None

    def _places(self, node: ast.expr, *, is_list: bool) -> Iterator[Place]:
        match node:
            case ast.Name(id=name) if name in self._classes:
                yield Place(is_list, name)
            case ast.Name(id=name) if name in self._aliases:
                yield from self._places(self._aliases[name], is_list=is_list)
            case ast.BinOp():
                yield from self._places(node.left, is_list=is_list)
                yield from self._places(node.right, is_list=is_list)
            case ast.Subscript(value=ast.Name(id="list"), slice=inner):
                yield from self._places(inner, is_list=True)


def of_vllm(root: Path) -> dict[str, list[str]]:
    """Return the paths of vLLM's fields by route, from a directory of its sources that has `entrypoints`."""
    classes = Pydantic([*sorted((root / "entrypoints").rglob("protocol.py")), root / "sampling_params.py"])
    found = {}
    for route, name in VLLM.items():
        listed = Listed(classes.shape_of)
        listed.add("", classes.shape_of(name), (name,))
        found[route] = sorted(listed.paths | set(VLLM_OLD.get(route, "").split()))
    return found


def of_llama(root: Path) -> dict[str, list[str]]:
    """Return the paths of llama.cpp's fields by route, from its schema and each parser in `tools/server`."""
    schema = re.sub(r"#if 0.*?#endif", "", (root / "server-schema.cpp").read_text(), flags=re.DOTALL)
    shared, parent = set[str](), ""
    for kind, name in re.findall(r'(field_\w+|add_alias)\("([^"]+)"', re.sub(r"//[^\n]*", "", schema)):
        if kind == "field_nested":
            parent = name
        nested = kind == "field_bool" and name == "include_usage"
        shared.add(f"{parent}.{name}" if nested else name)
    found = {}
    for route, (file, function) in LLAMA.items():
        source = (root / file).read_text()
        body = source[source.index(f"json {function}(") :]
        body = body[: body.index("\n}\n")]
        names = re.findall(r'\b(?:response_)?body(?:\.(?:at|contains|value|find)\(|, +)"(\w+)"', body)
        names += re.findall(r"for \(const auto \* key : \{([^}]*)\}", body)
        if not names:
            raise SystemExit(f"{root / file}: {function} names no field")
        found[route] = sorted(shared | set(names))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, metavar="DIR", help="vLLM's package, with entrypoints in it")
    parser.add_argument("--llama", type=Path, metavar="DIR", help="llama.cpp's tools/server")
    parser.add_argument("--quick", action="store_true", help="compare the installed packages with the list")
    parser.add_argument("--manual", action="store_true", help="print the columns of the gateway for its manual page")
    parser.add_argument("--table", metavar="NAME=URL", help="print each parameter's fate, there and in this tree")
    options = parser.parse_args()
    if options.manual:
        print(manual(), end="")
        return
    record: Fields = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if options.quick:
        sys.exit(compared(record))
    if options.table:
        print(table(record, options.table), end="")
        return
    found = {name: of_package(name) for name in PACKAGES}
    if options.vllm:
        found["vllm"] = of_vllm(options.vllm)
    if options.llama:
        found["llama.cpp"] = of_llama(options.llama)
    record |= {server: {route: by_object(paths) for route, paths in routes.items()} for server, routes in found.items()}
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    for server, routes in sorted(found.items()):
        print(server, *(f"{route} {len(paths)}" for route, paths in sorted(routes.items())), sep="\n  ")


def by_object(paths: Iterable[str]) -> dict[str, str]:
    """Group the names of fields by the object that contains them."""
    found: dict[str, list[str]] = {}
    for path in sorted(paths):
        before, dot, name = path.rpartition(".")
        found.setdefault(before + dot, []).append(name)
    return {before: " ".join(names) for before, names in found.items()}


def manual() -> str:
    """Return the gateway's table in roff."""
    sys.path.insert(0, str(RECORD.parents[3]))
    fields = importlib.import_module("lips.gateway.request_fields")
    lines = []
    for title, columns in fields.PARTS.items():
        lines += [".IP", f"\\fI{title}\\fP"]
        for column in fields.Column:
            if names := columns.of(column):
                text = ", ".join(_short(names)).replace("\\", "\\e").replace("-", "\\-")
                lines += [".br", f"{column.value}: {text}."]
    return "\n".join(lines) + "\n"


def _short(names: Iterable[str]) -> Iterator[str]:
    """Join the fields of each object into one word."""
    found: dict[str, list[str]] = {}
    for each in names:
        before, dot, name = each.partition("=")[0].rpartition(".")
        found.setdefault(before + dot, []).append(name + each[len(before + dot + name) :])
    for before, inner in found.items():
        if not before:
            yield from inner
        else:
            yield f"{before}{inner[0]}" if len(inner) == 1 else f"{before}{{{' '.join(inner)}}}"


def table(record: Fields, name_and_url: str) -> str:
    """Return the table of all parameters. Routes that treat a parameter in the same way share a line."""
    older, _, url = name_and_url.partition("=")
    sys.path.insert(0, str(RECORD.parents[3]))
    fields = importlib.import_module("lips.gateway.request_fields")
    servers: dict[tuple[str, str], list[str]] = {}
    for server, routes in record.items():
        for route, objects in routes.items():
            for name in objects[""].split():
                servers.setdefault((name, route), []).append(server)
    rows: dict[tuple[str, str, str], tuple[set[str], list[str]]] = {}
    for (name, route), have in sorted(servers.items()):
        now = fields.column_of(route, name).name.lower()
        found = rows.setdefault((name, before(url, route, name), now), (set(), []))
        found[0].update(have)
        found[1].append(SHORT[route])
    widths = "{:34}{:9}{:10}{:40}{}\n"
    lines = [
        widths.format(name, was, now, ", ".join(sorted(have)), ", ".join(routes))
        for (name, was, now), (have, routes) in rows.items()
    ]
    return HEAD.format(name=older) + widths.format("parameter", "before", "now", "servers", "routes") + "".join(lines)


def before(url: str, route: str, name: str) -> str:
    """Return how a gateway treats a parameter, judged by the gateway's answers."""
    least = {**(LEAST.get(route) or SAID), **BESIDE.get(name, {})}
    right = [*RIGHT, *TOOLS, *([least[name]] if name in least else [])]
    told = [posted(f"{url}{route}", {**least, name: value}) for value in WRONG]
    if all(status == 404 for status, _ in told):
        return "no route"
    if not any(is_refusal(each, name) for each in told):
        return "ignored"
    refused = all(is_refusal(posted(f"{url}{route}", {**least, name: value}), name) for value in right)
    return "refused" if refused else "obeyed"


def is_refusal(told: tuple[int, str], name: str) -> bool:
    status, message = told
    return status == 400 and re.search(rf"(?<!\w){name}(?!\w)", message) is not None


def posted(url: str, body: dict[str, Any]) -> tuple[int, str]:
    """Return the status of an answer, and its error message."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, ""
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["error"]["message"]


def compared(record: Fields) -> int:
    """Return 1 if an installed package has a field that the list lacks."""
    status = 0
    for name in PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            print(f"{name} is not installed")
            continue
        for route, paths in of_package(name).items():
            known = {f"{before}{each}" for before, names in record[name][route].items() for each in names.split()}
            if new := sorted(set(paths) - known):
                print(f"{name} {version}: {route} has fields that {RECORD.name} lacks:", *new)
                status = 1
    return status


if __name__ == "__main__":
    main()
