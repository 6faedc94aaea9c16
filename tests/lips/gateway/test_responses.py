"""/v1/responses with errors, and with clients that change their mind."""

import pytest

from tests.lips.gateway.wire import CHAT, COMPLETIONS, RESPONSES, events_of, post, running, streaming, until, user

ENDLESS = {"input": "Count without end.", "max_output_tokens": 4000, "min_p": 0.1}

pytestmark = pytest.mark.slow


def begun(http, **more):
    answer = post(http, RESPONSES, {**ENDLESS, "background": True, **more})
    assert answer["status"] == "queued"
    return f"{RESPONSES}/{answer['id']}"


def files(gateway):
    return {path.name for path in (gateway.files / "local" / "responses").iterdir()}


def test_what_can_not_be_kept_fails_and_ends_nothing_else(keyed):
    large = [{"type": "weird", "x": "z" * 4_500_000}, *user("Hi.")]
    with keyed.client("quota=8M", name="little") as http:
        path = begun(http, input=large, max_output_tokens=3)
        until(lambda: http.get(path).json()["status"] not in {"queued", "in_progress"})
        assert http.get(path).json()["status"] == "failed"
        refused = http.post(RESPONSES, json={"input": [*large, large[0]], "max_output_tokens": 3})
        assert refused.status_code == 413 or refused.json()["error"]["code"] == "insufficient_quota"
        directory = keyed.gateway.files / "little" / "responses"
        assert not [each.name for each in directory.iterdir() if each.name.endswith(".new")]
        assert http.delete(path).status_code == 200
        post(http, RESPONSES, input="Hi.", max_output_tokens=3)


def test_a_gateway_that_is_started_again_says_that_what_it_was_making_failed(start_gateway):
    first = start_gateway()
    with first.client() as http:
        path = begun(http)
    first.stop()
    with start_gateway().client() as http:
        found = http.get(path).json()
        assert found["status"] == "failed"
        assert "ended" in found["error"]["message"]
        assert http.post(f"{path}/cancel").json()["status"] == "failed"


def test_one_that_waits_for_its_turn_is_cancelled_too(start_gateway):
    gateway = start_gateway("--max-running", "1")
    with gateway.client() as http, streaming(http, ENDLESS, route=RESPONSES), gateway.client() as other:
        path = begun(other)
        assert other.post(f"{path}/cancel").json()["status"] == "cancelled"
        assert other.get(path).json()["status"] == "cancelled"


def test_one_that_is_deleted_while_it_is_made_and_one_whose_client_goes_leave_no_file(http, gateway):
    path = begun(http)
    until(lambda: running(http) == 1)
    response = path.rpartition("/")[2]
    post(http, RESPONSES, input="Go on.", previous_response_id=response, status=409)
    assert http.delete(path).json()["deleted"]
    assert http.get(path).status_code == 404
    assert not [name for name in files(gateway) if name.startswith(response)]
    before = files(gateway)
    with gateway.client() as other, streaming(other, ENDLESS, 20, RESPONSES):
        pass
    until(lambda: running(http) == 0)
    until(lambda: files(gateway) == before)


@pytest.mark.parametrize(
    "body",
    [
        b'{"input": []}',
        b'{"input": [{"type": "reasoning", "summary": []}]}',
        b'{"input": "Hi.", "background": true, "stream": true}',
        b'{"input": "Hi.", "background": true, "store": false}',
        *(b'{"input": "Hi.", "metadata": {"k": %s}}' % value for value in (b'"a\xed\xa0\x80b"', b"1e999", b'"\xff"')),
        '{"input": "Hi."}'.encode("utf-16"),
    ],
)
def test_what_makes_no_sense_or_is_no_json_is_refused(http, body):
    assert http.post(RESPONSES, content=body.replace(b"{", b'{"max_output_tokens": 2,', 1)).status_code == 400


def test_earlier_calls_may_have_any_arguments_and_one_that_is_cut_off_is_incomplete(http):
    call = {"type": "function_call", "call_id": "c", "name": "f"}
    for depth, status in ((100_000, 400), (1000, 200)):  # too long, no more
        result = {"type": "function_call_output", "call_id": "c", "output": "x"}
        items = [{**call, "arguments": "[" * depth}, result, *user("Hi.")]
        post(http, RESPONSES, input=items, max_output_tokens=2, status=status)
    long = {"type": "object", "properties": {"city": {"type": "string", "minLength": 500}}, "required": ["city"]}
    tools = [{"type": "function", "name": "weather", "parameters": long}]
    response = post(http, RESPONSES, input="Warm?", tools=tools, tool_choice="required", max_output_tokens=40)
    assert response["status"] == "incomplete"
    assert [(item["type"], item["status"]) for item in response["output"]] == [("function_call", "incomplete")]


def test_items_come_by_pages(http):
    items = [each for number in range(5) for each in user(f"Number {number}.")]
    path = f"{RESPONSES}/{post(http, RESPONSES, input=items, max_output_tokens=2)['id']}/input_items"
    first = http.get(path, params={"limit": 2}).json()
    rest = http.get(path, params={"after": first["last_id"], "limit": 100}).json()
    found = [*first["data"], *rest["data"]]
    assert (len(first["data"]), first["has_more"], rest["has_more"]) == (2, True, False)
    assert [each["content"] for each in found] == [f"Number {number}." for number in (4, 3, 2, 1, 0)]
    ascending = http.get(path, params={"order": "asc"}).json()
    assert [each["id"] for each in ascending["data"]] == [each["id"] for each in found][::-1]
    assert http.get(path, params={"limit": "0"}).status_code == 400
    assert http.get(path, params={"after": "x"}).status_code == 404


def test_a_stream_has_no_line_ends_of_other_kinds(http):
    body = {"prompt": "a\u2028b\u0085c", "echo": True, "stream": True, "max_tokens": 1}
    with http.stream("POST", COMPLETIONS, json=body) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
    assert events_of(lines[0])[0]["choices"][0]["text"] == body["prompt"]


def test_an_answer_that_does_not_begin_in_time_is_no_answer(start_gateway):
    with start_gateway("--timeout", "0.05").client() as http:
        refused = http.post(CHAT, json={"messages": user("word " * 3000), "max_tokens": 5})
        assert refused.status_code == 503, refused.text
        assert "retry-after" in refused.headers
