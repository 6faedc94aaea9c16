"""Clients that behave oddly: their requests are refused in words, and no other client waits for them."""

import contextlib
import json
import socket
import time

import pytest

from tests.lips.gateway.wire import (
    CHAT,
    ENDLESS,
    MESSAGES,
    QUESTION,
    RESPONSES,
    events_of,
    figure,
    post,
    running,
    until,
)


def connected(gateway, text=b""):
    host, port = gateway.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    connection.sendall(text)
    return connection


def head(*fields, path=CHAT):
    return "".join(f"{line}\r\n" for line in (f"POST {path} HTTP/1.1", "host: 127.0.0.1", *fields, "")).encode()


def request_of(body, *fields):
    data = json.dumps(body).encode()
    return head(f"content-length: {len(data)}", *fields) + data


def status_of(connection):
    return connection.recv(1 << 16).partition(b"\r\n")[0] + b" "


SCHEMA = '{"type": "json_schema", "json_schema": {"schema": {"type": "array", "uniqueItems": true}}}'
REFUSED = {
    "": "not JSON",
    "{": "not JSON",
    "[1]": "an object is expected",
    '{"messages": [{"role": "king", "content": "x"}]}': "role",
    '"n": 1e9': "n is",
    '"tools": [{"type": "function"}]': "tools[0]",
    '"tool_choice": "required"': "tool",
    '"response_format": {"type": "json_schema"}': "schema is missing",
    f'"response_format": {SCHEMA}': 'cannot hold "uniqueItems"',
    f'"conversation": "{5000 * "x"}"': "names no conversation",
}
"""Bodies, or fields beside a question."""


@pytest.mark.parametrize(("body", "says"), REFUSED.items(), ids=lambda text: text[:40])
def test_what_is_no_request_is_refused_in_words(http, body, says):
    if body.startswith('"'):
        body = f'{{"messages": [{{"role": "user", "content": "x"}}], {body}}}'
    answer = http.post(CHAT, content=body.encode())
    assert answer.status_code == 400, answer.text
    assert says in answer.json()["error"]["message"]


def test_another_path_or_method_is_refused_in_the_form_of_its_interface_and_half_a_character_is_read(http):
    assert http.get("/v1/nothing").json()["error"]["type"] == "not_found_error"
    assert http.get(CHAT).status_code == 405
    assert http.get(MESSAGES).json()["type"] == "error"
    body = b'{"max_tokens": 2, "messages": [{"role": "user", "content": "Hi \\ud83d"}]}'
    assert http.post(CHAT, content=body).status_code == 200
    assert http.post(RESPONSES, content=b'{"max_output_tokens": 2, "input": "\\ud83d"}').status_code == 200


def test_a_body_that_is_too_large_is_refused_before_it_is_read(gateway):
    with connected(gateway, head(f"content-length: {10**12}")) as connection:
        assert b" 413 " in status_of(connection)
    with connected(gateway, head("transfer-encoding: chunked")) as connection:
        answer = b""
        with contextlib.suppress(ConnectionError):  # it is closed while we are sending
            for _ in range(9):
                connection.sendall(b"100000\r\n" + b"x" * 0x100000 + b"\r\n")
            answer = status_of(connection)
        assert not answer.strip() or b" 413 " in answer


def test_a_body_that_does_not_come_is_not_waited_for(start_gateway):
    with connected(start_gateway("--body-timeout", "0.5"), head("content-length: 50") + b"{") as connection:
        assert b" 408 " in status_of(connection)


@pytest.mark.slow
def test_a_client_that_goes_away_frees_its_place_at_once(gateway, http):
    for stream in (True, False):
        gone = figure(http, "gone_total")
        with connected(gateway, request_of({**ENDLESS, "stream": stream})) as connection:
            if stream:
                assert b"data: " in connection.recv(1 << 12) + connection.recv(1 << 12)
            until(lambda: running(http) == 1)
        until(lambda gone=gone: figure(http, "gone_total") == gone + 1)
        assert running(http) == 0
        steps = http.get("/live").json()["steps"]
        time.sleep(0.2)
        num_more = http.get("/live").json()["steps"] - steps
        assert num_more <= 1, "the step under way is the last one for a client that went"
    post(http, CHAT, QUESTION)


def body_of(answer):
    """The body of an answer in chunks, and the answers behind it."""
    body, rest = b"", answer.partition(b"\r\n\r\n")[2]
    while True:
        size, _, rest = rest.partition(b"\r\n")
        if not (count := int(size, 16)):
            return body, rest.removeprefix(b"\r\n")
        body, rest = body + rest[:count], rest[count:].removeprefix(b"\r\n")


def read_all(connection):
    return b"".join(iter(lambda: connection.recv(1 << 20), b""))


def test_a_stream_is_in_chunks_or_for_a_client_of_http_1_0_as_it_is_and_two_streams_share_a_connection(gateway):
    asked = {**QUESTION, "stream": True, "temperature": 0}
    with connected(gateway, request_of(asked) + request_of(asked, "connection: close")) as connection:
        first, rest = body_of(read_all(connection))
    second, rest = body_of(rest)
    assert rest == b""
    with connected(gateway, request_of(asked).replace(b"HTTP/1.1", b"HTTP/1.0")) as connection:
        old = read_all(connection).partition(b"\r\n\r\n")[2]
    texts = [[each["choices"] for each in events_of(body.decode())] for body in (first, second, old)]
    assert len(texts[0]) > 4
    assert texts[0] == texts[1] == texts[2]
    assert first.endswith(b"data: [DONE]\n\n")


@pytest.mark.slow
def test_readers_that_stop_keep_nobody_waiting(gateway, http):
    stalled = [connected(gateway) for _ in range(10)]
    try:
        for connection in stalled:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(request_of({**ENDLESS, "stream": True, "logprobs": True}))
        until(lambda: running(http) == 10)
        post(http, CHAT, QUESTION)
        assert running(http) == 10, "none of them has ended before"
    finally:
        for connection in stalled:
            connection.close()
    until(lambda: running(http) == 0)


def test_more_than_there_is_room_for_are_told_when_to_come_again(start_gateway):
    gateway = start_gateway("--max-running", "1", "--max-waiting", "1")
    endless = request_of({**ENDLESS, "stream": True})
    with gateway.client() as http:
        with connected(gateway, endless):
            until(lambda: running(http) == 1)
            with connected(gateway, endless):
                until(lambda: figure(http, "waiting") == 1)
                refused = http.post(CHAT, json=QUESTION)
                assert refused.status_code == 429
                assert int(refused.headers["retry-after"]) >= 1
                assert refused.json()["error"]["type"] == "rate_limit_error"
                assert http.post(MESSAGES, json=QUESTION).json()["error"]["type"] == "rate_limit_error"
        until(lambda: running(http) == 0)
        post(http, CHAT, QUESTION)
