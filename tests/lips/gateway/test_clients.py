"""Requests of codex. `client_bodies.json` has those of other clients."""

import pytest

from tests.lips.gateway.wire import events_of


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


@pytest.mark.slow
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
