"""OpenAI's own client: chat, completions, streams, tools, structured output, responses."""

import json
from typing import Literal

import pytest
from pydantic import BaseModel

from tests.lips.gateway.wire import CAPITAL, until, user

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "The weather of a city", "parameters": PARAMETERS}
WEATHER = {"type": "function", "function": FUNCTION}


class City(BaseModel):
    name: Literal["Paris", "Rome"]
    is_large: bool


@pytest.fixture(scope="module")
def openai():
    import openai  # takes a second

    return openai


@pytest.fixture
def client(gateway, openai):
    with openai.OpenAI() as client:
        yield client


def ask(client, **options):
    options = {"messages": CAPITAL, "max_tokens": 24, "temperature": 0, **options}
    return client.chat.completions.create(model="any", **options)


def text_of(chunks, index=0):
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    return "".join(choice.delta.content or "" for choice in choices if choice.index == index)


@pytest.mark.slow
@pytest.mark.parametrize("gateway", [False, True], ids=["account", "key"], indirect=True)
def test_it_answers_and_counts_and_a_stream_is_the_same_answer_in_pieces(client):
    answer = ask(client)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == "SmolLM2-135M-Instruct"
    assert answer.usage.completion_tokens > 0
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert text_of(chunks) == answer.choices[0].message.content
    assert len(chunks) > 5, "it came in pieces"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.slow
def test_logprobs_are_those_of_the_tokens_of_the_text(client):
    wanted = {"logprobs": True, "top_logprobs": 4, "max_tokens": 6}
    choice = ask(client, **wanted).choices[0]
    tokens = choice.logprobs.content
    assert b"".join(bytes(token.bytes) for token in tokens).decode() == choice.message.content
    for token in tokens:
        assert len(token.top_logprobs) == 4
        assert token.logprob == pytest.approx(max(top.logprob for top in token.top_logprobs)), "it is the likeliest"
    streamed = [chunk.choices[0].logprobs for chunk in ask(client, **wanted, stream=True)]
    assert [entry.token for each in streamed if each for entry in each.content] == [each.token for each in tokens]


@pytest.mark.slow
def test_a_tool_is_called_answered_and_the_answer_used_and_calls_come_in_deltas(client):
    asked = user("How warm is it in Paris?")
    first = ask(client, messages=asked, tools=[WEATHER], tool_choice="required", max_tokens=80).choices[0]
    assert first.finish_reason == "tool_calls"
    call = first.message.tool_calls[0]
    assert call.function.name == "weather"
    assert set(json.loads(call.function.arguments)) == {"city", "unit"}
    asked += [first.message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}]
    second = ask(client, messages=asked, tools=[WEATHER])
    assert second.choices[0].message.content
    assert second.usage.prompt_tokens_details.cached_tokens > 100, "the tools were not computed again"

    options = {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    whole = ask(client, **options, max_tokens=80).choices[0].message.tool_calls[0].function
    chunks = list(ask(client, **options, max_tokens=80, stream=True))
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert deltas[0].function.name == whole.name
    assert "".join(delta.function.arguments or "" for delta in deltas) == whole.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.slow
def test_structured_output_is_parsed_and_an_error_of_the_client_where_it_is_cut_off(client, openai):
    asked = {"model": "any", "messages": user("Tell me of Paris."), "response_format": City}
    parsed = client.chat.completions.parse(**asked, max_tokens=60, temperature=0)
    assert isinstance(parsed.choices[0].message.parsed, City)
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**asked, max_tokens=3)
    text = ask(client, messages=asked["messages"], response_format={"type": "json_object"}, max_tokens=8).choices[0]
    assert text.message.content.startswith("{")


@pytest.mark.slow
def test_text_completions_go_on_echo_and_score(client):
    def complete(prompt, **options):
        return client.completions.create(model="any", prompt=prompt, **options)

    france = "The capital of France is"
    assert "Paris" in complete(france, max_tokens=4, temperature=0).choices[0].text
    several = complete(["One two", [504, 253]], n=2, max_tokens=3, seed=1)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    echoed = complete(france, echo=True, logprobs=2, max_tokens=1, temperature=0).choices[0]
    assert echoed.text.startswith(france)
    assert "".join(echoed.logprobs.tokens) == echoed.text
    assert echoed.logprobs.token_logprobs[0] is None, "nothing is before it"
    assert all(logprob <= 0 for logprob in echoed.logprobs.token_logprobs[1:])


@pytest.mark.slow
def test_many_prompts_of_one_request_share_steps(client, http, openai):
    prompts = [f"Number {number} is" for number in range(20)]
    options = {"model": "any", "echo": True, "max_tokens": 8, "extra_body": {"ignore_eos": True}}
    before = http.get("/live").json()["steps"]
    choices = client.completions.create(prompt=prompts, **options).choices
    assert http.get("/live").json()["steps"] - before < 80, "one after the other they take 160"
    assert [choice.index for choice in choices] == list(range(20))
    heard = dict.fromkeys(range(20), "")
    for piece in client.completions.create(prompt=prompts, stream=True, **options):
        for choice in piece.choices:
            heard[choice.index] += choice.text
    for texts in (heard.values(), [choice.text for choice in choices]):
        assert all(text.startswith(prompt) for text, prompt in zip(texts, prompts, strict=True))
    with pytest.raises(openai.BadRequestError, match=r"context of .*: send fewer or shorter messages"):
        client.completions.create(prompt=[*prompts, "word " * 9000], model="any")


def test_errors_are_the_clients_own_classes(client, openai):
    with pytest.raises(openai.BadRequestError, match="temperature is -1"):
        ask(client, temperature=-1)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")
    assert client.models.list().data[0].id == "SmolLM2-135M-Instruct"


@pytest.mark.slow
def test_responses_go_on_from_one_another_by_their_files(client, gateway, openai):
    how = {"model": "any", "instructions": "You are brief.", "max_output_tokens": 12, "temperature": 0}
    first = client.responses.create(input="My name is Ann.", **how)
    assert first.output_text
    second = client.responses.create(previous_response_id=first.id, input="What is my name?", **how)
    known = second.usage.input_tokens_details.cached_tokens
    assert known >= first.usage.input_tokens, "what was said before was not computed again"
    assert (gateway.files / "local" / "responses" / f"{second.id}.kv").exists()
    assert client.responses.retrieve(second.id).output_text == second.output_text
    assert len(client.responses.input_items.list(second.id).data) == 3, "a question, its answer, the second question"
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)


@pytest.mark.slow
def test_a_stream_of_a_response_has_its_events_in_order(client):
    with client.responses.stream(model="any", input=CAPITAL, max_output_tokens=40, temperature=0) as stream:
        happened = list(stream)
        final = stream.get_final_response()
    kinds, numbers = [each.type for each in happened], [each.sequence_number for each in happened]
    begins = ("created", "in_progress", "output_item.added", "content_part.added")
    assert kinds[:4] == [f"response.{name}" for name in begins]
    assert kinds[-1] in {"response.completed", "response.incomplete"}
    deltas = [each.delta for each in happened if each.type == "response.output_text.delta"]
    assert "".join(deltas) == final.output_text
    assert numbers == sorted(numbers)


@pytest.mark.slow
def test_a_response_calls_functions_and_parses_structures(client):
    how = {"model": "any", "tools": [{"type": "function", **FUNCTION, "strict": True}]}
    first = client.responses.create(
        input="How warm is it in Rome?", **how, tool_choice="required", max_output_tokens=80
    )
    call = next(item for item in first.output if item.type == "function_call")
    assert set(json.loads(call.arguments)) == {"city", "unit"}
    result = [{"type": "function_call_output", "call_id": call.call_id, "output": "30 C"}]
    goes_on = {"previous_response_id": first.id, "tool_choice": "none", "max_output_tokens": 20}
    assert client.responses.create(input=result, **how, **goes_on).output_text
    parsed = client.responses.parse(model="any", input="Tell me of Paris.", text_format=City, max_output_tokens=60)
    assert isinstance(parsed.output_parsed, City)


@pytest.mark.slow
def test_a_response_in_the_background_is_polled_and_cancelled(client):
    asked = {"input": "Count without end.", "background": True, "max_output_tokens": 4000}
    begun = client.responses.create(model="any", **asked, extra_body={"min_p": 0.1})
    assert begun.status == "queued"
    client.responses.cancel(begun.id)
    until(lambda: client.responses.retrieve(begun.id).status == "cancelled")
