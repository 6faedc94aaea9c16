#!/usr/bin/env python3
"""Records the requests of the tests' clients in `tests/lips/gateway/client_bodies.json`: client, route, body.

The server records the request of each client and refuses it, so no model is needed:

    .venv/bin/python scripts/conformance/client_bodies.py
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

RECORD = Path(__file__).resolve().parents[2] / "tests" / "lips" / "gateway" / "client_bodies.json"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
CITY = {
    "type": "object",
    "properties": {"name": {"type": "string"}},
    "required": ["name"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "The weather", "parameters": CITY}
TOOL = {"type": "function", "function": FUNCTION}


class Recorder(BaseHTTPRequestHandler):
    """HTTP server that records each body."""

    found: list[tuple[str, Any]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.found.append((self.path.partition("?")[0], json.loads(body)))
        said = b'{"type": "error", "error": {"type": "invalid_request_error", "message": "noted"}}'
        self.send_response(400)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *_: object) -> None:
        pass


def openai_calls(url: str) -> list[Callable[[], object]]:
    import openai
    from pydantic import BaseModel

    class City(BaseModel):
        name: str

    client: Any = openai.OpenAI(base_url=f"{url}/v1", api_key="none")  # what is sent is recorded, not typed
    chat, responses = client.chat.completions, client.responses
    function = {"type": "function", **FUNCTION, "strict": True}
    named = {"type": "function", "function": {"name": "weather"}}
    ask: dict[str, Any] = {"model": "any", "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    said: dict[str, Any] = {"model": "any", "input": "Hi", "max_output_tokens": 24}
    return [
        lambda: chat.create(**ask),
        lambda: chat.create(**ask, stream=True, stream_options={"include_usage": True}),
        lambda: chat.create(**ask, n=3, seed=7, stop=["Paris"], logprobs=True, top_logprobs=4, logit_bias={"5": -100}),
        lambda: chat.create(**ask, tools=[TOOL], tool_choice=named, parallel_tool_calls=False),
        lambda: chat.create(**ask, response_format={"type": "json_object"}, user="ann", store=False),
        lambda: chat.parse(**ask, response_format=City),
        lambda: client.completions.create(model="any", prompt=["One", "two"], echo=True, logprobs=2, max_tokens=1),
        lambda: responses.create(**said, instructions="Be brief.", previous_response_id="resp_1"),
        lambda: responses.create(**said, tools=[function], tool_choice="required", background=True),
        lambda: responses.create(**said, reasoning={"effort": "low"}, include=["reasoning.encrypted_content"]),
        lambda: responses.parse(**said, text_format=City),
        lambda: responses.stream(**said).__enter__(),
    ]


def anthropic_calls(url: str) -> list[Callable[[], object]]:
    import anthropic

    client: Any = anthropic.Anthropic(base_url=url, api_key="none")
    cached = {"type": "ephemeral"}
    system = [{"type": "text", "text": "Be brief.", "cache_control": cached}]
    tool = {"name": "weather", "description": "The weather", "input_schema": CITY}
    ask: dict[str, Any] = {"model": "any", "messages": QUESTION, "max_tokens": 24}
    thinking = {"type": "enabled", "budget_tokens": 1024}
    turns = [
        *QUESTION,
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t", "name": "weather", "input": {"name": "Rome"}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "21", "is_error": False}]},
    ]
    return [
        lambda: client.messages.create(**ask, system=system, stop_sequences=["x"], metadata={"user_id": "ann"}),
        lambda: client.messages.create(**{**ask, "messages": turns}, tools=[tool], tool_choice={"type": "any"}),
        lambda: client.messages.create(**ask, thinking=thinking, service_tier="auto", stream=True),
        lambda: client.messages.count_tokens(model="any", messages=QUESTION, system="Be brief.", tools=[tool]),
        lambda: client.messages.stream(**ask).__enter__(),
    ]


def litellm_calls(url: str) -> list[Callable[[], object]]:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise litellm downloads its price list
    import litellm

    ask: dict[str, Any] = {"messages": QUESTION, "max_tokens": 24, "temperature": 0, "api_key": "none"}
    return [
        lambda: litellm.completion("openai/any", api_base=f"{url}/v1", **ask),
        lambda: litellm.completion("openai/any", api_base=f"{url}/v1", stream=True, tools=[TOOL], **ask),
        lambda: litellm.completion("anthropic/any", api_base=url, **ask),
        lambda: litellm.completion("anthropic/any", api_base=url, tools=[TOOL], **ask),
    ]


def langchain_calls(url: str) -> list[Callable[[], object]]:
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel

    class City(BaseModel):
        """A city."""

        name: str

    made: Any = ChatOpenAI
    model = made(model="any", temperature=0, max_tokens=60, base_url=f"{url}/v1", api_key="none")
    return [
        lambda: model.invoke("Hi"),
        lambda: list(model.stream("Hi")),
        lambda: model.bind_tools([City], tool_choice="required").invoke("Hi"),
        lambda: model.with_structured_output(City, method="json_schema").invoke("Hi"),
        lambda: made(model="any", use_responses_api=True, base_url=f"{url}/v1", api_key="none").invoke("Hi"),
    ]


def llm_calls(url: str) -> list[Callable[[], object]]:
    def ask(*options: str) -> None:
        with tempfile.TemporaryDirectory() as directory:
            model = f"- model_id: symphony\n  model_name: any\n  api_base: {url}/v1\n"
            (Path(directory) / "extra-openai-models.yaml").write_text(model)
            command = [sys.executable, "-m", "llm", "-m", "symphony", *options, "Hi"]
            environment = {**os.environ, "LLM_USER_PATH": directory, "LLM_LOAD_PLUGINS": "", "OPENAI_API_KEY": "none"}
            subprocess.run(command, check=False, capture_output=True, timeout=100, env=environment)

    return [lambda: ask("-o", "temperature", "0", "-o", "max_tokens", "24"), lambda: ask("--no-stream")]


def curl_calls(url: str) -> list[Callable[[], object]]:
    body = json.dumps({"messages": QUESTION, "max_tokens": 4000, "ignore_eos": True, "stream": True})
    command = ["curl", "-sS", "--noproxy", "*", "-d", body, f"{url}/v1/chat/completions"]
    return [lambda: subprocess.run(command, check=True, capture_output=True)]


CLIENTS = {
    "openai": openai_calls,
    "anthropic": anthropic_calls,
    "litellm": litellm_calls,
    "langchain": langchain_calls,
    "llm": llm_calls,
    "curl": curl_calls,
}


def main() -> None:
    os.environ["NO_PROXY"] = "127.0.0.1"
    server = ThreadingHTTPServer(("127.0.0.1", 0), Recorder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    found: list[dict[str, Any]] = []
    for client, calls_of in CLIENTS.items():
        Recorder.found = []
        for call in calls_of(f"http://127.0.0.1:{server.server_port}"):
            before = len(Recorder.found)
            with contextlib.suppress(Exception):  # each client raises its own exception for a refusal
                call()
            if len(Recorder.found) == before:
                raise SystemExit(f"{client} has sent nothing")
        for route, body in Recorder.found:
            entry = {"client": client, "route": route, "body": body}
            found += [] if entry in found else [entry]
    server.shutdown()
    RECORD.write_text("[\n" + ",\n".join(json.dumps(each, sort_keys=True) for each in found) + "\n]\n")
    print(f"{len(found)} bodies")


if __name__ == "__main__":
    main()
