"""OpenAI's own client: chat, completions, streams, tools, structured output, responses."""

import asyncio
import json
from typing import Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def client(gateway):
    with openai.OpenAI() as client:
        yield client


def ask(client, **options):
    options = {"messages": QUESTION, "max_tokens": 24, "temperature": 0, **options}
    return client.chat.completions.create(model="any", **options)


def test_it_answers_and_counts(client):
    answer = ask(client)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == "SmolLM2-135M-Instruct"
    assert answer.usage.completion_tokens > 0
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_is_the_same_answer_in_pieces(client):
    whole = ask(client)
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert len(chunks) > 5, "it came in pieces"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({c.id for c in chunks}) == 1


def test_the_async_client_has_many_at_once(gateway):
    async def main():
        async with openai.AsyncOpenAI() as client:
            answers = await asyncio.gather(*(ask(client, seed=number, temperature=1) for number in range(8)))
            stream = await ask(client, stream=True)
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        return [answer.choices[0].message.content for answer in answers], "".join(pieces)

    answers, streamed = asyncio.run(main())
    assert len(set(answers)) > 1
    assert "Paris" in streamed


def test_n_answers_differ_by_their_draws_and_a_seed_gives_them_again(client):
    first = ask(client, n=3, temperature=1.5, seed=7, max_tokens=8)
    again = ask(client, n=3, temperature=1.5, seed=7, max_tokens=8)
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    assert texts == [choice.message.content for choice in again.choices]
    chunks = list(ask(client, n=3, temperature=1.5, seed=7, max_tokens=8, stream=True))
    streamed = ["".join(c.choices[0].delta.content or "" for c in chunks if c.choices[0].index == i) for i in range(3)]
    assert streamed == texts


def test_stops_lengths_and_biases_hold(client):
    whole = ask(client).choices[0].message.content
    stopped = ask(client, stop=["Paris"]).choices[0]
    assert stopped.message.content == whole.partition("Paris")[0]
    assert stopped.finish_reason == "stop"
    assert ask(client, max_tokens=3).choices[0].finish_reason == "length"
    assert ask(client, max_completion_tokens=3, max_tokens=None).usage.completion_tokens == 3
    first = ask(client, max_tokens=1, logprobs=True).choices[0].logprobs.content[0]
    tokens = client.post("../tokenize", cast_to=httpx.Response, body={"prompt": first.token}).json()["tokens"]
    assert len(tokens) == 1
    banned = ask(client, max_tokens=1, logprobs=True, logit_bias={str(tokens[0]): -100})
    assert banned.choices[0].logprobs.content[0].token != first.token


def test_logprobs_are_those_of_the_tokens_of_the_text(client):
    choice = ask(client, logprobs=True, top_logprobs=4, max_tokens=6).choices[0]
    tokens = choice.logprobs.content
    assert b"".join(bytes(token.bytes) for token in tokens).decode() == choice.message.content
    for token in tokens:
        assert len(token.top_logprobs) == 4
        assert token.logprob == pytest.approx(max(top.logprob for top in token.top_logprobs)), "it is the likeliest"
    chunks = list(ask(client, logprobs=True, top_logprobs=4, max_tokens=6, stream=True))
    streamed = [entry for c in chunks if c.choices[0].logprobs for entry in c.choices[0].logprobs.content]
    assert [entry.token for entry in streamed] == [entry.token for entry in tokens]


def test_a_tool_is_called_answered_and_the_answer_used(client):
    asked = [{"role": "user", "content": "How warm is it in Paris?"}]
    first = ask(client, messages=asked, tools=[WEATHER], tool_choice="required", max_tokens=80).choices[0]
    assert first.finish_reason == "tool_calls"
    call = first.message.tool_calls[0]
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "weather"
    assert set(arguments) == {"city", "unit"}
    asked += [first.message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}]
    second = ask(client, messages=asked, tools=[WEATHER])
    assert second.choices[0].message.content
    assert second.usage.prompt_tokens_details.cached_tokens > 100, "the tools were not computed again"


def test_calls_come_in_deltas_that_make_the_same_call(client):
    options = {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    whole = ask(client, **options, max_tokens=80).choices[0].message.tool_calls[0].function
    chunks = list(ask(client, **options, max_tokens=80, stream=True))
    deltas = [call for c in chunks for call in c.choices[0].delta.tool_calls or ()]
    assert deltas[0].function.name == whole.name
    assert "".join(delta.function.arguments or "" for delta in deltas) == whole.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


class City(BaseModel):
    name: Literal["Paris", "Rome"]
    is_large: bool


def test_structured_output_is_parsed(client):
    asked = [{"role": "user", "content": "Tell me of Paris."}]
    parsed = client.chat.completions.parse(
        model="any", messages=asked, response_format=City, max_tokens=60, temperature=0
    )
    assert isinstance(parsed.choices[0].message.parsed, City)
    text = ask(client, messages=asked, response_format={"type": "json_object"}, max_tokens=200).choices[0]
    if text.finish_reason == "stop":
        assert isinstance(json.loads(text.message.content), dict)
    assert text.message.content.startswith("{")


def test_structured_output_that_is_cut_off_is_an_error_of_the_client(client):
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model="any", messages=QUESTION, response_format=City, max_tokens=3)


def test_text_completions_go_on_echo_and_score(client):
    done = client.completions.create(model="any", prompt="The capital of France is", max_tokens=4, temperature=0)
    assert "Paris" in done.choices[0].text
    several = client.completions.create(model="any", prompt=["One two", [504, 253]], n=2, max_tokens=3, seed=1)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    echoed = client.completions.create(
        model="any", prompt="The capital of France is", echo=True, logprobs=2, max_tokens=1, temperature=0
    ).choices[0]
    assert echoed.text.startswith("The capital of France is")
    assert "".join(echoed.logprobs.tokens) == echoed.text
    assert all(logprob <= 0 for logprob in echoed.logprobs.token_logprobs if logprob is not None)
    assert echoed.logprobs.token_logprobs[0] is None, "nothing is before it"
    pieces = list(client.completions.create(model="any", prompt="One two", max_tokens=5, seed=1, stream=True))
    whole = client.completions.create(model="any", prompt="One two", max_tokens=5, seed=1).choices[0].text
    assert "".join(piece.choices[0].text for piece in pieces) == whole


def test_many_prompts_of_one_request_share_steps(client, gateway):
    prompts = [f"Number {number} is" for number in range(20)]
    options = {"model": "any", "echo": True, "max_tokens": 8, "extra_body": {"ignore_eos": True}}
    with gateway.client() as http:
        before = http.get("/live").json()["steps"]
        choices = client.completions.create(prompt=prompts, **options).choices
        num_steps = http.get("/live").json()["steps"] - before
    assert [choice.index for choice in choices] == list(range(20))
    assert all(choice.text.startswith(prompt) for choice, prompt in zip(choices, prompts, strict=True))
    assert num_steps < 80, "one after the other they take 160"
    heard = dict.fromkeys(range(20), "")
    for piece in client.completions.create(prompt=prompts, stream=True, **options):
        for choice in piece.choices:
            heard[choice.index] += choice.text
    assert all(heard[number].startswith(prompt) for number, prompt in enumerate(prompts))
    with pytest.raises(openai.BadRequestError, match=r"context of .*: send fewer or shorter messages"):
        client.completions.create(prompt=[*prompts, "word " * 9000], model="any")


def test_errors_are_the_clients_own_classes(client):
    with pytest.raises(openai.BadRequestError, match=r"temperature is -1"):
        ask(client, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="messages"):
        ask(client, messages=[])
    with pytest.raises(openai.BadRequestError, match="context"):
        ask(client, messages=[{"role": "user", "content": "word " * 9000}])
    with pytest.raises(openai.BadRequestError, match="image_url"):
        ask(client, messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")
    assert client.models.list().data[0].id == "SmolLM2-135M-Instruct"


def test_responses_go_on_from_one_another_by_their_files(client, gateway):
    first = client.responses.create(
        model="any", instructions="You are brief.", input="My name is Ann.", max_output_tokens=12, temperature=0
    )
    assert first.output_text
    assert first.status in {"completed", "incomplete"}
    second = client.responses.create(
        model="any",
        previous_response_id=first.id,
        instructions="You are brief.",
        input="What is my name?",
        max_output_tokens=12,
        temperature=0,
    )
    known = second.usage.input_tokens_details.cached_tokens
    assert known >= first.usage.input_tokens, "what was said before was not computed again"
    assert (gateway.files / "local" / "responses" / f"{second.id}.kv").exists()
    again = client.responses.retrieve(second.id)
    assert again.output_text == second.output_text
    items = client.responses.input_items.list(second.id).data
    assert len(items) == 3, "the first question, its answer, the second question"
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)


def test_a_stream_of_a_response_has_its_events_in_order(client):
    with client.responses.stream(
        model="any", input="What is the capital of France?", max_output_tokens=40, temperature=0
    ) as stream:
        kinds, deltas, numbers = [], [], []
        for happened in stream:
            kinds.append(happened.type)
            numbers.append(getattr(happened, "sequence_number", None))
            if happened.type == "response.output_text.delta":
                deltas.append(happened.delta)
        final = stream.get_final_response()
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-1] in {"response.completed", "response.incomplete"}
    assert "".join(deltas) == final.output_text
    assert numbers == sorted(numbers)


def test_a_response_calls_functions_and_parses_structures(client):
    tool = {"type": "function", **WEATHER["function"], "strict": True}
    first = client.responses.create(
        model="any", input="How warm is it in Rome?", tools=[tool], tool_choice="required", max_output_tokens=80
    )
    call = next(item for item in first.output if item.type == "function_call")
    assert set(json.loads(call.arguments)) == {"city", "unit"}
    second = client.responses.create(
        model="any",
        previous_response_id=first.id,
        tools=[tool],
        tool_choice="none",
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "30 C"}],
        max_output_tokens=20,
    )
    assert second.output_text
    parsed = client.responses.parse(model="any", input="Tell me of Paris.", text_format=City, max_output_tokens=60)
    assert isinstance(parsed.output_parsed, City)


def test_a_response_in_the_background_is_polled_and_cancelled(client):
    begun = client.responses.create(
        model="any", input="Count without end.", background=True, max_output_tokens=4000, extra_body={"min_p": 0.1}
    )
    assert begun.status == "queued"
    client.responses.cancel(begun.id)
    for _ in range(200):
        found = client.responses.retrieve(begun.id)
        if found.status not in {"queued", "in_progress"}:
            break
    assert found.status == "cancelled", found.error
