"""/v1/responses with errors, and with clients that change their mind."""

import json

import pytest

from lips.gateway.keys import new_key
from tests.lips.gateway.test_odd_clients import running, until

RESPONSES = "/v1/responses"
ENDLESS = {"input": "Count without end.", "max_output_tokens": 4000, "min_p": 0.1}
UNDER_WAY = {"queued", "in_progress"}

pytestmark = pytest.mark.slow


def begun(http, **more):
    answer = http.post(RESPONSES, json={**ENDLESS, "background": True, **more})
    assert answer.status_code == 200, answer.text
    assert answer.json()["status"] == "queued"
    return answer.json()["id"]


def files(gateway):
    return {path.name for path in (gateway.files / "local" / "responses").iterdir()}


def test_what_can_not_be_kept_fails_and_ends_nothing_else(start_gateway, tmp_path):
    key, line = new_key("little")
    path = tmp_path / "keys"
    path.write_text(f"{line} quota=8M\n")
    path.chmod(0o600)
    gateway = start_gateway("--keys", str(path))
    large = [{"type": "weird", "x": "z" * 4_500_000}, {"role": "user", "content": "Hi."}]
    with gateway.client(key) as http:
        response = begun(http, input=large, max_output_tokens=3)
        until(lambda: http.get(f"{RESPONSES}/{response}").json()["status"] not in UNDER_WAY)
        assert http.get(f"{RESPONSES}/{response}").json()["status"] == "failed"
        refused = http.post(RESPONSES, json={"input": [*large, large[0]], "max_output_tokens": 3})
        assert refused.status_code == 413 or refused.json()["error"]["code"] == "insufficient_quota"
        directory = gateway.files / "little" / "responses"
        assert not [each.name for each in directory.iterdir() if each.name.endswith(".new")]
        assert http.delete(f"{RESPONSES}/{response}").status_code == 200
        assert http.post(RESPONSES, json={"input": "Hi.", "max_output_tokens": 3}).status_code == 200


def test_a_gateway_that_is_started_again_says_that_what_it_was_making_failed(start_gateway):
    first = start_gateway()
    with first.client() as http:
        response = begun(http)
    first.stop()
    with start_gateway().client() as http:
        found = http.get(f"{RESPONSES}/{response}").json()
        assert found["status"] == "failed"
        assert "ended" in found["error"]["message"]
        assert http.post(f"{RESPONSES}/{response}/cancel").json()["status"] == "failed"


def test_one_that_waits_for_its_turn_is_cancelled_too(start_gateway):
    gateway = start_gateway("--max-running", "1")
    with gateway.client() as http, http.stream("POST", RESPONSES, json={**ENDLESS, "stream": True}) as answer:
        next(lines := answer.iter_lines())
        with gateway.client() as other:
            response = begun(other)
            assert other.post(f"{RESPONSES}/{response}/cancel").json()["status"] == "cancelled"
            assert other.get(f"{RESPONSES}/{response}").json()["status"] == "cancelled"
        del lines


def test_one_that_is_deleted_while_it_is_made_leaves_nothing(http, gateway):
    response = begun(http)
    until(lambda: running(http) == 1)
    assert http.post(RESPONSES, json={"input": "Go on.", "previous_response_id": response}).status_code == 409
    assert http.delete(f"{RESPONSES}/{response}").json()["deleted"]
    assert http.get(f"{RESPONSES}/{response}").status_code == 404
    assert not [name for name in files(gateway) if name.startswith(response)]


def test_a_client_that_goes_away_leaves_no_file(http, gateway):
    before = files(gateway)
    with gateway.client() as other, other.stream("POST", RESPONSES, json={**ENDLESS, "stream": True}) as answer:
        lines = answer.iter_lines()
        for _ in range(20):
            next(lines)
    until(lambda: running(http) == 0)
    until(lambda: files(gateway) == before)


@pytest.mark.parametrize(
    "body",
    [
        {"input": []},
        {"input": [{"type": "reasoning", "summary": []}]},
        {"input": "Hi.", "background": True, "stream": True},
        {"input": "Hi.", "background": True, "store": False},
    ],
)
def test_what_makes_no_sense_is_refused(http, body):
    assert http.post(RESPONSES, json={**body, "max_output_tokens": 2}).status_code == 400


@pytest.mark.parametrize("value", [b'"a\xed\xa0\x80b"', b"1e999", b'"\xff"'])
def test_what_is_no_json_is_refused(http, value):
    body = b'{"input": "Hi.", "max_output_tokens": 2, "metadata": {"k": ' + value + b"}}"
    assert http.post(RESPONSES, content=body).status_code == 400


def test_a_body_in_another_encoding_is_refused(http):
    assert http.post(RESPONSES, content='{"input": "Hi."}'.encode("utf-16")).status_code == 400


def test_earlier_calls_may_have_any_arguments(http):
    deep = "[" * 100_000
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": deep}
    items = [call, {"type": "function_call_output", "call_id": "c", "output": "x"}, {"role": "user", "content": "Hi."}]
    assert http.post(RESPONSES, json={"input": items, "max_output_tokens": 2}).status_code == 400, "too long, no more"
    call["arguments"] = "[" * 1000
    assert http.post(RESPONSES, json={"input": items, "max_output_tokens": 2}).status_code == 200


def test_a_call_that_is_cut_off_is_incomplete(http):
    long = {"type": "object", "properties": {"city": {"type": "string", "minLength": 500}}, "required": ["city"]}
    tool = {"type": "function", "name": "weather", "parameters": long}
    body = {"input": "How warm is it?", "tools": [tool], "tool_choice": "required", "max_output_tokens": 40}
    response = http.post(RESPONSES, json=body).json()
    assert response["status"] == "incomplete"
    assert [(item["type"], item["status"]) for item in response["output"]] == [("function_call", "incomplete")]


def test_items_come_by_pages(http):
    items = [{"role": "user", "content": f"Number {number}."} for number in range(5)]
    response = http.post(RESPONSES, json={"input": items, "max_output_tokens": 2}).json()["id"]
    path = f"{RESPONSES}/{response}/input_items"
    first = http.get(path, params={"limit": 2}).json()
    assert [each["content"] for each in first["data"]] == ["Number 4.", "Number 3."]
    assert first["has_more"]
    rest = http.get(path, params={"after": first["last_id"], "limit": 100}).json()
    assert [each["content"] for each in rest["data"]] == ["Number 2.", "Number 1.", "Number 0."]
    assert not rest["has_more"]
    ascending = http.get(path, params={"order": "asc"}).json()
    assert [each["id"] for each in ascending["data"]] == [each["id"] for each in [*first["data"], *rest["data"]]][::-1]
    assert http.get(path, params={"limit": "0"}).status_code == 400
    assert http.get(path, params={"after": "x"}).status_code == 404


def test_a_stream_has_no_line_ends_of_other_kinds(gateway):
    with gateway.client() as http:
        body = {"prompt": "a\u2028b\u0085c", "echo": True, "stream": True, "max_tokens": 1}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
    assert json.loads(lines[0][6:])["choices"][0]["text"] == body["prompt"]


def test_an_answer_that_does_not_begin_in_time_is_no_answer(start_gateway):
    with start_gateway("--timeout", "0.05").client() as http:
        asked = {"messages": [{"role": "user", "content": "word " * 3000}], "max_tokens": 5}
        refused = http.post("/v1/chat/completions", json=asked)
        assert refused.status_code == 503, refused.text
        assert "retry-after" in refused.headers
