"""Paths of fields, as scripts/conformance/request_fields.py lists them, and bodies that have them."""

import copy
import json
import re
from pathlib import Path

RECORD = Path(__file__).with_name("request_fields.json")
KIND = object()
"""Placeholder for a value: the path says the type."""
_STEP = re.compile(r"([^.\[\](]+)(\[\])?(?:\(([^)]*)\))?\.?")


def recorded(route):
    """Paths of a route, of all servers."""
    servers = json.loads(RECORD.read_text()).values()
    objects = [(prefix, names) for server in servers for prefix, names in server.get(route, {}).items()]
    return sorted({f"{prefix}{name}" for prefix, names in objects for name in names.split()})


def body_of(path, value, least=None, beside=None):
    """A body with a value at a path, beside what a request has at least, and the objects on the way."""
    body = copy.deepcopy(least or {})
    steps, here, where = _STEP.findall(path), body, ""
    for at, (name, is_list, kind) in enumerate(steps):
        if at == len(steps) - 1:
            here[name] = here.get("type") if value is KIND else value
            break
        inner = here.get(name)
        inner = inner[0] if isinstance(inner, list) else inner
        where += f"{name}{is_list}{f'({kind})' if kind else ''}"
        inner = inner if isinstance(inner, dict) else copy.deepcopy((beside or {}).get(where, {}))
        where += "."
        here[name] = [inner] if is_list else inner
        if kind:
            inner["type"] = kind
        here = inner
    return body
