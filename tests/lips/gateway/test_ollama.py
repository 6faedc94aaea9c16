"""Ollama's own client, and the requests of Open WebUI: chats, streams, tools, schemas, contexts."""

import pytest
from pydantic import BaseModel

from tests.lips.gateway.wire import CAPITAL, user

NAME = "SmolLM2-135M-Instruct"
GREEDY = {"temperature": 0, "num_predict": 24}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "The weather of a city", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}


class City(BaseModel):
    name: str
    is_large: bool


@pytest.fixture
def client(gateway):
    import ollama

    with ollama.Client(gateway.url, headers=gateway.client().headers, trust_env=False) as client:
        yield client


def is_refused(ask, says, status=400):
    import ollama

    with pytest.raises(ollama.ResponseError, match=says) as refused:
        ask()
    assert refused.value.status_code == status


@pytest.mark.slow
def test_a_chat_is_answered_counted_and_timed_and_a_stream_is_the_same_in_lines(client, http):
    answer = client.chat("any", CAPITAL, options=GREEDY, keep_alive="5m", think=False)
    assert "Paris" in answer.message.content
    assert (answer.model, answer.done, answer.done_reason) == (NAME, True, "stop")
    assert answer.prompt_eval_count > 10
    assert answer.total_duration >= answer.prompt_eval_duration + answer.eval_duration > 1_000_000, "nanoseconds"
    cut = client.chat("any", CAPITAL, options={**GREEDY, "num_predict": 3})
    assert (cut.done_reason, cut.eval_count) == ("length", 3)
    parts = list(client.chat("any", CAPITAL, options=GREEDY, stream=True))
    assert "".join(part.message.content for part in parts) == answer.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == answer.eval_count
    streamed = http.post("/api/chat", json={"model": "any", "messages": CAPITAL, "options": GREEDY})
    assert streamed.headers["content-type"] == "application/x-ndjson", "it streams unless it is told not to"


@pytest.mark.slow
def test_options_are_obeyed_named_by_a_header_or_refused(client, http):
    options = {**GREEDY, "seed": 3, "stop": ["Paris"], "num_ctx": 4096, "n": 3, "numa": None, "tfs_z": 1.0}
    answer = http.post("/api/chat", json={"messages": CAPITAL, "options": options, "stream": False, "frob\n": 1})
    assert "Paris" not in answer.json()["message"]["content"]
    assert answer.headers["symphony-ignored"] == "options.num_ctx, options.n, frob%0A"
    likeliest = {"temperature": 1.5, "num_predict": 8, "mirostat": 2, "mirostat_tau": 0, "mirostat_eta": 0}
    greedy = client.chat("any", CAPITAL, options={**GREEDY, "num_predict": 8})
    assert client.chat("any", CAPITAL, options=likeliest).message.content == greedy.message.content
    for option, says in (
        ({"top_p": 7}, r"options\.top_p is 7"),
        ({"temprature": 1}, r"options\.temprature is no field: is temperature meant"),
        ({"tfs_z": 0.5}, r"options\.tfs_z is not done"),
    ):
        is_refused(lambda option=option: client.chat("any", CAPITAL, options=option), says)


@pytest.mark.slow
def test_a_format_is_held(client):
    asked = {"format": City.model_json_schema(), "options": {**GREEDY, "num_predict": 60}}
    assert City.model_validate_json(client.chat("any", CAPITAL, **asked).message.content)
    assert client.generate("any", "A city", format="json", options=GREEDY).response.startswith("{")
    wrong = {"messages": CAPITAL, "format": 5}
    is_refused(lambda: client._request_raw("POST", "/api/chat", json=wrong), "format is 5")


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_with_an_object_and_what_came_of_it_is_used(client, stream):
    call = {"function": {"name": "weather", "arguments": {"city": "Paris"}}}
    messages = [  # a small model calls where it has called before
        *user("How warm is it in Paris?"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        *user("How warm is it in Madrid?"),
    ]
    answer = client.chat("any", messages, tools=[TOOL], options={**GREEDY, "num_predict": 60}, stream=stream)
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


@pytest.mark.slow
def test_a_generation_goes_on_from_its_context(client, http):
    asked = {"system": "You are brief.", "options": GREEDY}
    first = client.generate("any", "My name is Ann.", **asked)
    assert first.context[-1] != first.context[0]
    second = client.generate("any", "What is my name?", context=first.context, options=GREEDY)
    assert second.prompt_eval_count > len(first.context)
    assert second.context[: len(first.context)] == first.context
    both = {**asked, "prompt": "Hi", "context": list(first.context), "stream": False}
    assert http.post("/api/generate", json=both).headers["symphony-ignored"] == "system"
    fresh = client.generate("any", "My name is Ann.", context=[], **asked)
    assert fresh.context == first.context, "an empty context is none"
    raw = client.generate("any", "The capital of France is", raw=True, system="", context=[], options=GREEDY)
    assert "Paris" in raw.response
    assert raw.context is None
    for options, says in (
        ({"raw": True, "system": "x"}, "system: a raw prompt"),
        ({"raw": True, "context": [1]}, "context: a raw prompt"),
        ({"context": [10**9]}, "list of tokens"),
    ):
        is_refused(lambda options=options: client.generate("any", "x", **options), says)


def test_images_templates_embeddings_and_downloads_are_refused_in_words(client):
    not_done = "is not done by this server"
    pictured = [{"role": "user", "content": "x", "images": [b"x"]}]
    for ask, says, status in (
        (lambda: client.chat("any", pictured), rf"^messages\[\]\.images {not_done}", 400),
        (lambda: client.generate("any", "x", images=[b"x"]), f"^images {not_done}", 400),
        (lambda: client.generate("any", "x", template="x"), f"^template {not_done}", 400),
        (lambda: client.generate("any", "x", suffix="x"), f"^suffix {not_done}", 400),
        (lambda: client.embed("any", "x"), "no embeddings", 501),
        (lambda: client.embeddings("any", "x"), "no embeddings", 501),
        (lambda: client.pull("llama3"), "nothing is downloaded", 501),
        (lambda: client.show("llama3"), "not found", 404),
    ):
        is_refused(ask, says, status)


def test_the_model_is_listed_shown_and_loaded(client, http):
    assert [model.model for model in client.list().models] == [NAME]
    running = client.ps().models[0]
    assert (running.model, running.context_length) == (NAME, 8192)
    shown = client.show(f"{NAME}:latest")
    assert shown.modelinfo["llama.context_length"] == 8192
    assert "tools" in shown.capabilities
    assert "temperature 0.7" in shown.parameters
    assert http.get("/api/version").json()["version"].count(".") == 2
    assert http.head("/").status_code == 200
    assert client.generate("any", "").done_reason == "load"
    assert client.chat("any", [], keep_alive=0).done_reason == "unload"


@pytest.mark.slow
@pytest.mark.parametrize("gateway", [True], indirect=True)
def test_one_without_a_key_is_refused_in_the_form_of_the_interface(gateway):
    import ollama

    with ollama.Client(gateway.url, trust_env=False) as stranger:
        is_refused(stranger.list, "key", 403)
        assert set(stranger._client.get("/api/tags").json()) == {"error"}
