"""Clients that are built on others' interfaces: llm, litellm, LangChain; and the requests of codex."""

import asyncio
import json
import os
import subprocess
import sys

import pytest

from tests.lips.gateway.wire import CAPITAL, events_of

CITY = CAPITAL[0]["content"]


@pytest.mark.slow
def test_llm_asks_by_its_command_line(gateway, tmp_path):
    model = {"model_id": "symphony", "model_name": "SmolLM2-135M-Instruct", "api_key_name": "symphony"}
    models = [{**model, "api_base": f"{gateway.url}/v1"}]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models))  # which is YAML, too
    (tmp_path / "keys.json").write_text(json.dumps({"symphony": os.environ["OPENAI_API_KEY"]}))
    command = [sys.executable, "-m", "llm", "-m", "symphony", "-o", "temperature", "0", "-o", "max_tokens", "24", CITY]
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "LLM_LOAD_PLUGINS": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


@pytest.fixture
def event_loop():
    """Set an event loop for this thread. litellm makes one for its log where there is none, and never closes it."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    asyncio.set_event_loop(None)
    loop.close()


@pytest.mark.slow
@pytest.mark.usefixtures("event_loop")
def test_litellm_speaks_both_interfaces(gateway, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would be fetched
    import litellm

    key = os.environ["OPENAI_API_KEY"]
    options = {"messages": CAPITAL, "max_tokens": 24, "temperature": 0, "api_key": key}
    whole = litellm.completion("openai/any", api_base=f"{gateway.url}/v1", **options).choices[0].message.content
    assert "Paris" in whole
    chunks = list(litellm.completion("openai/any", api_base=f"{gateway.url}/v1", stream=True, **options))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    other = litellm.completion("anthropic/any", api_base=gateway.url, **options)
    assert other.choices[0].message.content == whole


@pytest.mark.slow
def test_langchain_binds_tools_and_parses_structures(gateway):
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel

    class Weather(BaseModel):
        """The weather of a city."""

        city: str
        is_warm: bool

    model = ChatOpenAI(model="any", temperature=0, max_tokens=60)
    assert "Paris" in model.invoke(CITY).content
    assert "Paris" in "".join(str(piece.content) for piece in model.stream(CITY))
    (call,) = model.bind_tools([Weather], tool_choice="required").invoke("Is it warm in Rome?").tool_calls
    assert call["name"] == "Weather"
    assert isinstance(call["args"]["is_warm"], bool)
    found = model.with_structured_output(Weather, method="json_schema").invoke("Is it warm in Rome?")
    assert isinstance(found, Weather)


def codex(previous=()):
    """A body as codex sends it, but for the length of its instructions: it keeps all items itself."""
    command = {"command": {"type": "array", "items": {"type": "string"}}}
    shell = {"type": "object", "properties": command, "required": ["command"], "additionalProperties": False}
    told = [{"type": "input_text", "text": "<permissions>read-only</permissions>"}]
    asked = [{"type": "input_text", "text": "List the files."}]
    grammar = {"type": "grammar", "syntax": "lark", "definition": "x"}
    return {
        "model": "gpt-5-codex",
        "instructions": "You are Codex, a coding agent. " * 20,
        "input": [
            {"type": "message", "role": "developer", "content": told},
            {"type": "message", "role": "user", "content": asked},
            *previous,
        ],
        "tools": [
            {"type": "function", "name": "shell", "description": "Runs it.", "strict": False, "parameters": shell},
            {"type": "custom", "name": "apply_patch", "format": grammar},
            {"type": "web_search", "external_web_access": False},
            {"type": "local_shell"},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199-codex-conversation",
        "max_output_tokens": 24,
    }


def test_what_codex_sends_is_answered_and_its_next_turn_computes_what_is_new(http, gateway):
    first = events_of(http.post("/v1/responses", json=codex()).text)
    assert first[0]["type"] == "response.created"
    assert first[-1]["type"] in {"response.completed", "response.incomplete"}
    turn = [
        *first[-1]["response"]["output"],
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        {"type": "function_call", "call_id": "call_1", "name": "shell", "arguments": '{"command":["ls"]}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "README.md"},
        {"type": "custom_tool_call", "call_id": "call_2", "name": "apply_patch", "input": "x"},
    ]
    second = events_of(http.post("/v1/responses", json=codex(turn)).text)[-1]["response"]["usage"]
    assert second["input_tokens_details"]["cached_tokens"] >= first[-1]["response"]["usage"]["input_tokens"] - 8
    models = http.get("/v1/models").json()
    assert models["models"][0]["slug"] == models["data"][0]["id"], "codex reads `models`"
    assert (gateway.files / "local" / "cached" / "0199-codex-conversation.kv").exists()
