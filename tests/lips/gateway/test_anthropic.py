"""Anthropic's own client: messages, streams, tools, counting; and the requests of Claude Code."""

import pytest

from tests.lips.gateway.wire import CAPITAL, events_of, user

pytestmark = pytest.mark.slow

WEATHER = {
    "name": "weather",
    "description": "The weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
}
CERTAIN = {"extra_body": {"temperature": 0}}
"""Greedy draws, passed as an extra field: this client has no argument `temperature` any more."""


@pytest.fixture
def client(gateway):
    import anthropic  # takes a second, and few runs have these slow tests

    with anthropic.Anthropic() as client:
        yield client


def ask(client, **options):
    return client.messages.create(model="any", **{"messages": CAPITAL, "max_tokens": 24, **CERTAIN, **options})


def test_it_answers_and_counts_and_a_stream_is_the_same_answer_in_pieces(client):
    answer = ask(client)
    assert "Paris" in answer.content[0].text
    with client.messages.stream(model="any", messages=CAPITAL, max_tokens=24, **CERTAIN) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(pieces) == answer.content[0].text == final.content[0].text
    assert len(pieces) > 5
    assert final.stop_reason == answer.stop_reason == "end_turn"
    assert final.usage.output_tokens == answer.usage.output_tokens > 5
    told, brief = ask(client, system="You are brief."), {"messages": CAPITAL, "system": "You are brief."}
    counted = client.messages.count_tokens(model="any", **brief).input_tokens
    assert counted == told.usage.input_tokens + told.usage.cache_read_input_tokens
    again = ask(client, **brief)
    assert again.usage.cache_read_input_tokens == counted - 1, "all but the token to go on from"


def test_stops_have_their_reasons(client):
    assert ask(client, max_tokens=2).stop_reason == "max_tokens"
    stopped = ask(client, stop_sequences=["Paris"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "Paris")
    assert "Paris" not in stopped.content[0].text


def test_a_tool_is_used_and_its_result_read(client):
    asked = user("How warm is it in Rome?")
    how = {"tools": [WEATHER], "tool_choice": {"type": "any"}, "max_tokens": 80}
    first = ask(client, messages=asked, **how)
    use = first.content[-1]
    assert first.stop_reason == "tool_use"
    assert (use.type, use.name, set(use.input)) == ("tool_use", "weather", {"city", "unit"})
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "30 degrees"}
    asked += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = ask(client, messages=asked, tools=[WEATHER])
    assert second.content
    assert second.usage.cache_read_input_tokens > 100, "the tools were not computed again"
    with client.messages.stream(model="any", messages=CAPITAL, **CERTAIN, **how) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert set(final.content[-1].input) == {"city", "unit"}
    assert "input_json" in kinds
    assert final.stop_reason == "tool_use"


def claude_codes(number):
    """A body as Claude Code sends it, but for its length: the first block of the system's text changes each time."""
    kept = {"cache_control": {"type": "ephemeral"}}
    called = {"type": "tool_use", "id": "toolu_01", "name": "weather", "input": {"city": "Rome", "unit": "C"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_01", "content": [{"type": "text", "text": "30"}]}
    return {
        "model": "claude-opus-4-6",
        "max_tokens": 16,
        "temperature": 1,
        "stream": True,
        "metadata": {"user_id": "user_0a1b_account__session_6f9619ff-8b86-d011-b42d-00c04fc964ff"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "system": [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.36; cch={number:05x};"},
            {"type": "text", "text": "You are Claude Code, an agent.", **kept},
            {"type": "text", "text": "Follow the user's instructions. " * 20, **kept},
        ],
        "tools": [{**WEATHER, **kept}, {"type": "bash_20250124", "name": "bash"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "<system-reminder>Be kind.</system-reminder>"}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "x"}, called]},
            {"role": "user", "content": [{**result, "is_error": False}, {"type": "text", "text": "And?", **kept}]},
        ],
    }


def test_what_claude_code_sends_is_answered_and_its_changing_block_is_no_part_of_the_prompt(http, gateway):
    for number in (1, 2):
        answer = http.post("/v1/messages?beta=true", json=claude_codes(number))
        assert answer.status_code == 200, answer.text
        events = events_of(answer.text)
        assert events[-1]["type"] == "message_stop"
        usage = next(each for each in events if each["type"] == "message_start")["message"]["usage"]
    assert usage["input_tokens"] == 1, "all but the token to go on from"
    name = "6f9619ff-8b86-d011-b42d-00c04fc964ff.kv"
    assert (gateway.files / "local" / "sessions" / name).exists(), "its session is a file"
