"""Fields of requests: each that clients of OpenAI, Anthropic and Ollama, vLLM and llama.cpp know is in one column."""

import json
import re
import runpy
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Match

import libsym as sym
from lips.gateway.app import ROUTES as ROUTES_OF_APP
from lips.gateway.asgi import told
from lips.gateway.errors import ApiError
from lips.gateway.gateway import ENDED, Settings, make_gateway
from lips.gateway.keys import OneKey
from lips.gateway.request_fields import MAX_NAMED, ROUTES, Column, check, column_of
from tests.lips.gateway.conftest import gateways
from tests.lips.gateway.request_paths import KIND, body_of, recorded
from tests.lips.gateway.wire import CHAT, COMPLETIONS, MESSAGES, RESPONSES, post, user

ROOT = Path(__file__).resolve().parents[3]
COUNT = f"{MESSAGES}/count_tokens"
LISTING = ROOT / "scripts" / "conformance" / "request_fields.py"
KEY = "of-this-process-alone"
NONSENSE = ({"wrong": 1}, [[1]], "\x00", -7)
"""No field takes all of these."""
FREE = ("model", "tools[](custom).input_schema.properties", "tools[](custom).input_schema.required")
"""Any name of a model is taken, and what is in a schema is the template's."""
QUESTION = {"max_tokens": 1, "messages": user("Hi")}
LEAST = {
    CHAT: QUESTION,
    COMPLETIONS: {"max_tokens": 1, "prompt": "Hi"},
    RESPONSES: {"max_output_tokens": 1, "store": False, "input": "Hi"},
    MESSAGES: QUESTION,
    COUNT: {"messages": QUESTION["messages"]},
    "/api/chat": {"messages": QUESTION["messages"], "options": {"num_predict": 1}},
    "/api/generate": {"prompt": "Hi", "options": {"num_predict": 1}},
}
CALL = {"function": {"name": "f"}}
F = {"name": "f"}
BESIDE = {
    CHAT: {"tools[]": CALL, "tools[](function)": CALL, "messages[].tool_calls[](function)": CALL},
    RESPONSES: {"input[](function_call)": F, "input[](message)": {"role": "user"}, "tools[](function)": F},
    MESSAGES: {
        **dict.fromkeys(["tools[]", "tools[](custom)", "messages[].content[](tool_use)", "tool_choice(tool)"], F),
        "tool_choice": {"type": "tool", "name": "f"},
    },
    "/api/chat": {"tools[]": CALL, "messages[].tool_calls[]": CALL},
}
BESIDE[COUNT] = BESIDE[MESSAGES]
"""Fields that objects have to have."""
OFFERED = {CHAT: [{"type": "function", **CALL}], RESPONSES: [{"type": "function", **F}], MESSAGES: [F], COUNT: [F]}


def is_of_any_type(path):
    """vLLM has one class for Anthropic's blocks of all types: what becomes of a field depends on the type."""
    return path.startswith(("messages[].content[].", "system[]."))


def is_in_schema(path):
    """Ollama's client has classes for what a schema of parameters has in it."""
    return path.startswith("tools[].function.parameters.")


@pytest.mark.parametrize("route", ROUTES)
def test_every_field_of_every_server_is_in_one_column(route):
    """Accepted fields are named in the header, refused ones in the error."""
    for path in recorded(route):
        column = column_of(route, path)
        assert column is not None, path
        if is_of_any_type(path):
            continue
        body = body_of(path, KIND if path.endswith(".type") else "x")
        if column is Column.REFUSED:
            with pytest.raises(ApiError) as caught:
                check(route, body)
            assert is_named(path, [caught.value.param]), (path, caught.value.param)
        else:
            ignored = check(route, body)
            assert not ignored.unknown, path
            assert is_named(path, ignored.paths) is (column is Column.ACCEPTED), (path, ignored.paths)


def is_named(path, names):
    """Whether one of the names is of the field, or of one that it is in."""
    return any(path.startswith(name) or plain(path).startswith(plain(name)) for name in names)


def plain(path):
    """Return a path without its types."""
    return "".join(part.partition(")")[2] if at else part for at, part in enumerate(path.split("(")))


class Reader:
    """A gateway in this process, of which only what reads a body runs: nothing is computed."""

    def __init__(self, gateway):
        self._app = Starlette(routes=ROUTES_OF_APP)
        self._app.state.gateway = gateway

    async def refusal(self, path, body):
        """Return what is said of a body that is refused; "": of another."""

        async def receive():
            return {"type": "http.request", "body": json.dumps(body).encode()}

        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "app": self._app}
        scope["headers"] = [(b"authorization", f"Bearer {KEY}".encode())]
        route: Any = next(each for each in ROUTES_OF_APP if each.matches(scope)[0] is Match.FULL)
        with ExitStack() as ended:
            try:
                await route.endpoint(Request({**scope, "route": route, ENDED: ended}, receive))
            except (ApiError, sym.SymError) as error:
                if told(error).status != 400:
                    raise
                return told(error).message
        return ""


@pytest.mark.parametrize("route", ROUTES)
async def test_fields_that_are_obeyed_are_read(tiny_gateway, monkeypatch, route):
    """A value of another kind is refused in every such field."""
    monkeypatch.setenv("SYMPHONY_SOCKET", str(tiny_gateway.daemon.socket))
    paths = [
        path
        for path in recorded(route)
        if column_of(route, path) is Column.OBEYED and not (path in FREE or is_of_any_type(path) or is_in_schema(path))
    ]
    unread = []
    gateway = Reader(await make_gateway(Settings(directory="read"), OneKey(KEY, "")))
    for path in paths:
        leaf = plain(path).rpartition(".")[2].removesuffix("[]")
        least = LEAST[route] | ({"tools": OFFERED[route]} if path.startswith("tool_choice") else {})
        for value in NONSENSE:
            if leaf in await gateway.refusal(route, body_of(path, value, least, BESIDE.get(route))):
                break
        else:
            unread.append(path)
    sym.close()
    assert paths
    assert not unread


@pytest.mark.parametrize("route", ROUTES)
def test_a_route_tells_its_client_what_it_refuses(tiny, route):
    name = "messages" if route == COUNT else "stream"
    assert f"{name} is -7: " in json.dumps(post(tiny, route, LEAST[route], **{name: -7}, status=400))


@pytest.mark.slow
def test_the_list_has_all_fields_of_the_clients_that_are_installed_and_the_manual_the_three_columns():
    done = subprocess.run([sys.executable, LISTING, "--quick"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    done = subprocess.run([sys.executable, LISTING, "--manual"], capture_output=True, text=True, check=True)
    assert done.stdout in (ROOT / "man" / "lips-gateway-fields.7").read_text()


def test_the_fates_of_parameters_are_found_from_a_gateways_answers(tiny_gateway):
    before = runpy.run_path(str(LISTING))["before"]
    asked = ((CHAT, "temperature"), (COMPLETIONS, "suffix"), (CHAT, "user"), ("/v1/nowhere", "user"))
    assert [before(tiny_gateway.url, *each) for each in asked] == ["obeyed", "refused", "ignored", "no route"]


@pytest.mark.slow
def test_the_requests_in_the_manual_are_answered(tiny):
    for page in ("lips-gateway.7", "lips-gateway-fields.7"):
        text = (ROOT / "man" / page).read_text().replace("\\-", "-").replace("\\(aq", "'").replace("\\e\n", "")
        asked = re.findall(r"localhost:8080(/\S+) +-d '(\{.*\})'(?:\nsymphony-ignored: (\S+))?", text)
        assert asked, page
        for route, body, ignored in asked:
            answer = tiny.post(route, json=json.loads(body))
            assert (answer.status_code, answer.headers.get("symphony-ignored", "")) == (200, ignored)


def test_ignored_fields_are_named_in_a_header_and_unknown_ones_in_the_log(tiny_gateway, tiny):
    unknown = {"fr\u00f6b\r\nx": 1, "user": "ann", "metadata": {"a": "b"}, "stream_options": None}
    answer = tiny.post(CHAT, json={**QUESTION, **unknown})
    assert answer.status_code == 200
    assert answer.headers["symphony-ignored"] == "fr%C3%B6b%0D%0Ax, user, metadata"
    assert "symphony-ignored" not in tiny.post(CHAT, json=QUESTION).headers
    streamed = tiny.post(CHAT, json={**QUESTION, "stream": True, "thinking": {"type": "enabled"}})
    assert streamed.headers["symphony-ignored"] == "thinking"
    said = f"gateway: {CHAT}: a client sends the unknown field fr%C3%B6b%0D%0Ax, which has no effect\n"
    assert tiny_gateway.until_it_says("unknown field fr") == said


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ({"temprature": 1}, "temperature"),
        ({"tpo_p": 1}, "top_p"),
        ({"max_tokenss": 1}, "max_tokens"),
        ({"messages": [{"role": "user", "contant": "x"}]}, "content"),
    ],
)
def test_a_slip_of_the_pen_is_refused_with_what_is_meant(slip, meant):
    with pytest.raises(ApiError, match=f"is no field: is {meant} meant"):
        check(CHAT, slip)


def test_a_name_of_another_interface_is_no_slip():
    """`input` is one of responses, and no edit of `inputs`, which nobody has."""
    ignored = check(COMPLETIONS, {"prompt": "x", "input": 1, "stop_sequences": []})
    assert list(ignored.unknown) == ["input", "stop_sequences"]
    with pytest.raises(ApiError, match="prompt meant"):
        check(COMPLETIONS, {"prompts": "x"})


def test_a_hostile_body_is_cut():
    ignored = check(CHAT, {f"{number}\x1b[2J" + "x" * 100: 1 for number in range(100_000)})
    assert len(ignored.paths) == MAX_NAMED
    assert ignored.header.endswith(f"and {100_000 - MAX_NAMED} more")
    assert len(ignored.header) < 1200
    assert ignored.header.isprintable()


def test_values_that_ask_for_nothing_are_not_refused():
    silly = {"top_n_sigma": -1, "xtc_probability": 0.0, "samplers": [], "grammar": "", "n_probs": 0, "suffix": ""}
    assert not check(COMPLETIONS, {**silly, "parse_tool_calls": True}).unknown
    for refused in ({"parse_tool_calls": False}, {"xtc_probability": 0.1}, {"n_cmpl": 2}):
        with pytest.raises(ApiError, match=f"{next(iter(refused))} is not done"):
            check(COMPLETIONS, refused)


@pytest.mark.slow
def test_a_strict_gateway_refuses_unknown_fields(tiny_gateway):
    with gateways(tiny_gateway.daemon) as start, start("--strict", "--directory", "strict").client() as http:
        assert http.post(CHAT, json={**QUESTION, "user": "ann"}).headers["symphony-ignored"] == "user"
        assert post(http, CHAT, QUESTION, frob=1, status=400)["error"]["param"] == "frob"


@pytest.mark.slow
def test_what_the_suites_clients_send_is_not_refused(tiny):
    """`client_bodies.json`: recorded by `scripts/conformance/client_bodies.py`."""
    bodies = json.loads((ROOT / "tests" / "lips" / "gateway" / "client_bodies.json").read_text())
    assert {each["client"] for each in bodies} >= {"openai", "anthropic", "litellm", "langchain", "llm", "curl"}
    for each in bodies:
        assert not check(each["route"], each["body"]).unknown, each
        short = {name: 1 if name.startswith("max_") else value for name, value in each["body"].items()}
        answer = tiny.post(each["route"], json=short)
        assert answer.status_code == (404 if "previous_response_id" in short else 200), (each, answer.text)
