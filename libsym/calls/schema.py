"""JSON schemas prepared for grammars: objects are closed, as in OpenAI's strict mode, and multiples are bounded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from libsym.errors import Invalid

Schema = dict[str, Any]
MOST = 10**15 - 1
"""Bound of numbers with multipleOf: the largest number of 15 digits, which a double represents exactly."""
MAX_VISITS = 50_000
"""Limit on visits to schemas. So many visits take about 0.2 s. A schema is visited once for each path to it, and
references multiply the paths.
"""
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = ("items", "additionalProperties", "additionalItems")
_COMBINING = ("allOf", "anyOf", "oneOf")
_SAYS = ("additionalProperties", "unevaluatedProperties")
_BOUNDS = (("minimum", "exclusiveMinimum", -MOST), ("maximum", "exclusiveMaximum", MOST))


def closed(schema: Any) -> Any:
    """Return the schema with `"additionalProperties": false` in each object that names properties but lacks that key.

    If allOf, anyOf or a reference combines schemas, only the schema that combines them gets the key. A number with
    multipleOf gets the bounds that it lacks, since grammars would allow endless digits.
    """
    root = json.loads(json.dumps(schema))
    if isinstance(root, dict):
        _Closing(root).close()
    return root


class _Closing:
    """A pass that closes the objects of a schema, in place."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._num_visits = 0

    def close(self) -> None:
        nodes = self._nodes()
        combined = {id(node) for node in nodes if sum(map(self._names, self._parts(node))) > 1}
        within = {id(part) for node in nodes if id(node) in combined for part in self._reached(node)[1:]}
        for node in nodes:
            if node.get("uniqueItems") is False:
                del node["uniqueItems"]  # a false value has no meaning, and grammars refuse the key
            if "multipleOf" in node:
                _bound(node)
        for node in [each for each in nodes if id(each) not in within]:
            together = self._reached(node) if id(node) in combined else [node]
            names = dict.fromkeys(name for each in together for name in _mapping(each, "properties"))
            if names and not any(says in each for each in together for says in _SAYS):
                names |= dict.fromkeys(each for each in _list(node, "required") if isinstance(each, str))
                node["properties"] = {**dict.fromkeys(names, True), **_mapping(node, "properties")}
                node["additionalProperties"] = False

    def _nodes(self) -> list[Schema]:
        """Return all schemas inside the root, including those that only a reference reaches."""
        found: dict[int, Schema] = {}
        left = [self._root]
        while left:
            node = left.pop()
            if id(node) not in found:
                found[id(node)] = node
                left += [each for each in (*_inner(node), self._target(node)) if isinstance(each, dict)]
        return list(found.values())

    def _parts(self, node: Schema) -> Iterator[list[Any]]:
        """Yield the parts of a schema, as lists of schemas: its properties, each schema of allOf, anyOf, oneOf, and its
        reference.
        """
        yield [{"properties": node.get("properties")}]
        yield from ([each] for each in _list(node, "allOf"))
        yield _list(node, "anyOf")
        yield _list(node, "oneOf")
        yield [self._target(node)]

    def _names(self, part: list[Any]) -> bool:
        """Return whether any schema of the part, or any schema that it combines, names properties."""
        reached = (other for each in part if isinstance(each, dict) for other in self._reached(each))
        return any(_mapping(each, "properties") for each in reached)

    def _reached(self, node: Schema) -> list[Schema]:
        """Return a schema and all schemas that it combines."""
        found: dict[int, Schema] = {}
        left = [node]
        while left:
            each = left.pop()
            self._num_visits += 1
            if self._num_visits > MAX_VISITS:
                raise Invalid("the schema combines too many others by allOf, anyOf, oneOf and references")
            if id(each) not in found:
                found[id(each)] = each
                inner = [other for name in _COMBINING for other in _list(each, name)]
                left += [other for other in (self._target(each), *reversed(inner)) if isinstance(other, dict)]
        return list(found.values())

    def _target(self, node: Schema) -> Any:
        """Return the schema that a reference names, if it is inside the root."""
        reference = node.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        found: Any = self._root
        for step in reference[1:].split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, dict) else None
        return found


def _bound(node: Schema) -> None:
    for name in ("multipleOf", *(each for low, exclusive, _ in _BOUNDS for each in (low, exclusive))):
        if isinstance(node.get(name), (int, float)) and abs(node[name]) > MOST:
            raise Invalid(f"multipleOf beside {name} {node[name]}: a grammar holds multiples of at most 15 digits")
    for name, exclusive, bound in _BOUNDS:
        if name not in node and exclusive not in node:
            node[name] = bound


def _inner(node: Schema) -> Iterator[Any]:
    for name in _MAPS:
        yield from _mapping(node, name).values()
    for name in _LISTS:
        yield from _list(node, name)
    for name in _SINGLE:
        yield node.get(name)


def _mapping(node: Schema, name: str) -> Schema:
    found = node.get(name)
    return found if isinstance(found, dict) else {}


def _list(node: Schema, name: str) -> list[Any]:
    found = node.get(name)
    return found if isinstance(found, list) else []
