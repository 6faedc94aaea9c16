"""Ollama's own client, and the requests of Open WebUI: chats, streams, tools, schemas, contexts."""

import json

import httpx
import ollama
import pytest
from pydantic import BaseModel

NAME = "SmolLM2-135M-Instruct"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0, "num_predict": 24}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture
def client(gateway):
    with ollama.Client(gateway.url, headers=gateway.client().headers, trust_env=False) as client:
        yield client


def test_a_chat_is_answered_counted_and_timed(client):
    answer = client.chat("any", QUESTION, options=GREEDY, keep_alive="5m", think=False)
    assert "Paris" in answer.message.content
    assert (answer.model, answer.done, answer.done_reason) == (NAME, True, "stop")
    assert answer.eval_count > 0
    assert answer.prompt_eval_count > 10
    assert answer.total_duration >= answer.prompt_eval_duration + answer.eval_duration > 1_000_000, "nanoseconds"
    cut = client.chat("any", QUESTION, options={**GREEDY, "num_predict": 3})
    assert (cut.done_reason, cut.eval_count) == ("length", 3)


def test_a_stream_is_the_same_answer_in_lines(client, http):
    whole = client.chat("any", QUESTION, options=GREEDY)
    parts = list(client.chat("any", QUESTION, options=GREEDY, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == whole.eval_count
    answer = http.post("/api/chat", json={"model": "any", "messages": QUESTION, "options": GREEDY})
    assert answer.headers["content-type"] == "application/x-ndjson", "it streams unless it is told not to"
    assert json.loads(answer.text.splitlines()[-1])["done"] is True


def test_options_are_obeyed_named_by_a_header_or_refused(client, http):
    options = {**GREEDY, "seed": 3, "stop": ["Paris"], "num_ctx": 4096, "n": 3, "numa": None, "tfs_z": 1.0}
    answer = http.post("/api/chat", json={"messages": QUESTION, "options": options, "stream": False, "frob\n": 1})
    assert "Paris" not in answer.json()["message"]["content"]
    assert answer.headers["symphony-ignored"] == "options.num_ctx, options.n, frob%0A"
    warm = {"temperature": 1.5, "num_predict": 8}
    said = [client.generate("any", "hi", options={**warm, "seed": seed}).response for seed in (1, 1, 2)]
    assert said[0] == said[1] != said[2]
    likeliest = {"temperature": 1.5, "mirostat": 2, "mirostat_tau": 0, "mirostat_eta": 0, "num_predict": 8}
    greedy = client.chat("any", QUESTION, options={**GREEDY, "num_predict": 8})
    assert client.chat("any", QUESTION, options=likeliest).message.content == greedy.message.content
    for option, says in (
        ({"top_p": 7}, r"options\.top_p is 7"),
        ({"temprature": 1}, r"options\.temprature is no field: is temperature meant"),
        ({"tfs_z": 0.5}, r"options\.tfs_z is not done"),
    ):
        with pytest.raises(ollama.ResponseError, match=says) as refused:
            client.chat("any", QUESTION, options=option)
        assert refused.value.status_code == 400


class City(BaseModel):
    name: str
    is_large: bool


def test_a_format_is_held(client):
    for stream in (False, True):
        asked = {"format": City.model_json_schema(), "options": {**GREEDY, "num_predict": 60}, "stream": stream}
        answer = client.chat("any", QUESTION, **asked)
        text = "".join(part.message.content for part in answer) if stream else answer.message.content
        assert City.model_validate_json(text)
    assert client.generate("any", "A city", format="json", options=GREEDY).response.startswith("{")
    with pytest.raises(ollama.ResponseError, match="format is 5"):
        client._request_raw("POST", "/api/chat", json={"messages": QUESTION, "format": 5})


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_with_an_object_and_what_came_of_it_is_used(client, stream):
    call = {"function": {"name": "weather", "arguments": {"city": "Paris"}}}
    messages = [  # a small model calls where it has called before
        {"role": "user", "content": "How warm is it in Paris?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "user", "content": "How warm is it in Madrid?"},
    ]
    asked = {"tools": [TOOL], "options": {**GREEDY, "num_predict": 60}, "stream": stream}
    answer = client.chat("any", messages, **asked)
    parts = list(answer) if stream else [answer]
    calls = [each for part in parts for each in part.message.tool_calls or ()]
    assert [(each.function.name, each.function.arguments) for each in calls] == [("weather", {"city": "Madrid"})]
    assert parts[-1].done_reason == "stop"
    messages += [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "21 degrees", "tool_name": "weather"},
    ]
    second = client.chat("any", messages, tools=[TOOL], options=GREEDY)
    assert second.prompt_eval_count > parts[-1].prompt_eval_count


def test_a_generation_goes_on_from_its_context(client, http):
    first = client.generate("any", "My name is Ann.", system="You are brief.", options=GREEDY)
    assert first.context[-1] != first.context[0]
    second = client.generate("any", "What is my name?", context=first.context, options=GREEDY)
    assert second.prompt_eval_count > len(first.context)
    assert second.context[: len(first.context)] == first.context
    both = {"prompt": "Hi", "system": "Be brief.", "context": list(first.context), "stream": False, "options": GREEDY}
    assert http.post("/api/generate", json=both).headers["symphony-ignored"] == "system"
    fresh = client.generate("any", "My name is Ann.", system="You are brief.", context=[], options=GREEDY)
    assert fresh.context == first.context, "an empty context is none"
    nothing = {"raw": True, "system": "", "context": []}
    raw = client.generate("any", "The capital of France is", **nothing, options=GREEDY)
    assert "Paris" in raw.response
    assert raw.context is None
    for name, value in (("system", "x"), ("context", [1])):
        with pytest.raises(ollama.ResponseError, match=f"{name}: a raw prompt"):
            client.generate("any", "x", raw=True, **{name: value})
    with pytest.raises(ollama.ResponseError, match="list of tokens"):
        client.generate("any", "x", context=[10**9])


def test_images_templates_embeddings_and_downloads_are_refused_in_words(client):
    for ask, says in (
        (lambda: client.chat("any", [{"role": "user", "content": "x", "images": [b"x"]}]), r"messages\[\]\.images"),
        (lambda: client.generate("any", "x", images=[b"x"]), "images"),
        (lambda: client.generate("any", "x", template="x"), "template"),
        (lambda: client.generate("any", "x", suffix="x"), "suffix"),
    ):
        with pytest.raises(ollama.ResponseError, match=f"^{says} is not done by this server") as refused:
            ask()
        assert refused.value.status_code == 400
    for ask, says in (
        (lambda: client.embed("any", "x"), "no embeddings"),
        (lambda: client.embeddings("any", "x"), "no embeddings"),
        (lambda: client.pull("llama3"), "nothing is downloaded"),
    ):
        with pytest.raises(ollama.ResponseError, match=says) as refused:
            ask()
        assert refused.value.status_code == 501


def test_the_model_is_listed_shown_and_loaded(client, http):
    assert [model.model for model in client.list().models] == [NAME]
    running = client.ps().models[0]
    assert (running.model, running.context_length) == (NAME, 8192)
    shown = client.show(f"{NAME}:latest")
    assert shown.modelinfo["llama.context_length"] == 8192
    assert "tools" in shown.capabilities
    assert "temperature 0.7" in shown.parameters
    with pytest.raises(ollama.ResponseError, match="not found"):
        client.show("llama3")
    assert http.get("/api/version").json()["version"].count(".") == 2
    assert http.head("/").status_code == 200
    assert client.generate("any", "").done_reason == "load"
    assert client.chat("any", [], keep_alive=0).done_reason == "unload"


def test_a_key_is_brought_as_a_bearer(start_gateway):
    gateway = start_gateway(blind=True)
    with ollama.Client(gateway.url, trust_env=False) as stranger, pytest.raises(ollama.ResponseError) as refused:
        stranger.list()
    assert refused.value.status_code == 403
    assert set(json.loads(httpx.get(f"{gateway.url}/api/tags", trust_env=False).text)) == {"error"}
    with ollama.Client(gateway.url, headers={"authorization": f"Bearer {gateway.key}"}, trust_env=False) as client:
        assert client.list().models
