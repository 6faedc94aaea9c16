"""Clients that behave oddly: their requests are refused in words, and no other client waits for them."""

import asyncio
import json
import socket
import time
from functools import partial

import httpx
import pytest

CHAT = "/v1/chat/completions"
QUESTION = {"messages": [{"role": "user", "content": "Count from one to a thousand."}], "max_tokens": 8}


def address(gateway):
    host, port = gateway.url.removeprefix("http://").split(":")
    return host, int(port)


def request_of(body, path=CHAT, **headers):
    """A request as bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {"host": "127.0.0.1", "content-length": str(len(data)), **headers}
    head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in fields.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + data


def received(connection):
    found = b""
    while part := connection.recv(1 << 16):
        found += part
    return found


def figure(http, name):
    return int(http.get("/metrics").text.partition(f"\nsymphony_gateway_{name} ")[2].partition("\n")[0])


def has_grown(http, gone):
    return figure(http, "gone_total") == gone + 1


def running(http):
    return figure(http, "running")


def steps_of(http):
    return http.get("/live").json()["steps"]


def until(condition, seconds=20):
    end_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_s, "it did not come true"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[1]", "an object is expected"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "deep"),
        (b'{"messages": 5}', "messages"),
        (b'{"messages": [5]}', r"messages[0]"),
        (b'{"messages": [{"role": "king", "content": "x"}]}', "role"),
        (b'{"messages": [{"role": "user", "content": "x"}], "n": 1e9}', "n is"),
        (b'{"messages": [{"role": "user", "content": "x"}], "stop": [1]}', "stop"),
        (b'{"messages": [{"role": "user", "content": "x"}], "logit_bias": {"x": 1}}', "logit_bias"),
        (b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}', "tools[0]"),
        (b'{"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}', "tool"),
        (b'{"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "x"}}', "response_format"),
        (
            b'{"messages": [{"role": "user", "content": "x"}], "response_format": 5}',
            "response_format is 5",
        ),
        (
            b'{"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_schema"}}',
            "schema is missing",
        ),
        (
            b'{"messages": [{"role": "user", "content": "x"}], "response_format": %s}'
            % b'{"type": "json_schema", "json_schema": {"schema": {"type": "array", "uniqueItems": true}}}',
            'cannot hold "uniqueItems"',
        ),
        (
            b'{"messages": [{"role": "user", "content": "x"}], "conversation": "%s"}' % (5000 * b"x"),
            "names no conversation",
        ),
    ],
)
def test_what_is_no_request_is_refused_in_words(http, body, says):
    answer = http.post(CHAT, content=body)
    assert answer.status_code == 400, answer.text
    assert says in answer.json()["error"]["message"]


def test_half_a_character_is_no_reason_to_refuse(http):
    body = b'{"max_tokens": 2, "messages": [{"role": "user", "content": "Hi \\ud83d"}]}'
    assert http.post(CHAT, content=body).status_code == 200
    assert http.post("/v1/responses", content=b'{"max_output_tokens": 2, "input": "\\ud83d"}').status_code == 200


def test_another_path_or_method_is_refused_in_the_form_of_its_interface(http):
    assert http.get("/v1/nothing").json()["error"]["type"] == "not_found_error"
    assert http.get(CHAT).status_code == 405
    assert http.get("/v1/messages").json()["type"] == "error"


def test_a_body_that_is_too_large_is_refused_before_it_is_read(gateway):
    with socket.create_connection(address(gateway), timeout=20) as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {10**12}\r\n\r\n".encode())
        assert b" 413 " in connection.recv(1 << 16).partition(b"\r\n")[0] + b" "
    with socket.create_connection(address(gateway), timeout=20) as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        part = b"100000\r\n" + b"x" * 0x100000 + b"\r\n"
        answer = b""
        try:
            for _ in range(9):
                connection.sendall(part)
            answer = connection.recv(1 << 16)
        except ConnectionError:  # it was closed while we were sending
            pass
        assert not answer or b" 413" in answer.partition(b"\r\n")[0]


@pytest.mark.slow
def test_a_body_that_does_not_come_is_not_waited_for(start_gateway):
    gateway = start_gateway("--body-timeout", "0.5")
    with socket.create_connection(address(gateway), timeout=20) as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 50\r\n\r\n{{".encode())
        assert b" 408" in connection.recv(1 << 16).partition(b"\r\n")[0]


def test_a_client_that_goes_away_frees_its_place_at_once(gateway, http):
    endless = {**QUESTION, "max_tokens": 4000, "ignore_eos": True}
    for stream in (True, False):
        gone = figure(http, "gone_total")
        with socket.create_connection(address(gateway), timeout=20) as connection:
            connection.sendall(request_of({**endless, "stream": stream}))
            if stream:
                assert b"data: " in connection.recv(1 << 12) + connection.recv(1 << 12)
            until(lambda: running(http) == 1)
        until(partial(has_grown, http, gone), 3)
        assert running(http) == 0
        steps = steps_of(http)
        time.sleep(0.2)
        assert steps_of(http) - steps <= 1, "the step under way is the last one for a client that went"
    with gateway.client() as other:
        assert other.post(CHAT, json=QUESTION).status_code == 200


def test_a_client_that_half_closes_gets_its_answer_or_is_taken_for_gone(gateway, http):
    """HTTP/1.1 lets a server do either; it must not keep the place."""
    with socket.create_connection(address(gateway), timeout=20) as connection:
        connection.sendall(request_of(QUESTION, connection="close"))
        connection.shutdown(socket.SHUT_WR)
        answer = received(connection)
    assert not answer or b" 200" in answer.partition(b"\r\n")[0]
    until(lambda: running(http) == 0, 3)


def test_readers_that_stop_keep_nobody_waiting(gateway, http):
    endless = request_of({**QUESTION, "max_tokens": 3000, "ignore_eos": True, "stream": True, "logprobs": True})
    stalled = [socket.create_connection(address(gateway), timeout=20) for _ in range(10)]
    try:
        for connection in stalled:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(endless)
        until(lambda: running(http) == 10)
        began_s = time.monotonic()
        assert http.post(CHAT, json=QUESTION).status_code == 200
        assert time.monotonic() - began_s < 10
    finally:
        for connection in stalled:
            connection.close()
    until(lambda: running(http) == 0)


@pytest.mark.slow
def test_two_hundred_streams_at_once_all_end(gateway):
    async def main():
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=gateway.url, timeout=100, limits=limits, trust_env=False) as client:

            async def one(number):
                body = {**QUESTION, "stream": True, "max_tokens": 4, "seed": number, "ignore_eos": True}
                async with client.stream("POST", CHAT, json=body) as answer:
                    return [line async for line in answer.aiter_lines() if line.startswith("data: ")]

            return await asyncio.gather(*(one(number) for number in range(200)))

    streams = asyncio.run(main())
    assert {lines[-1] for lines in streams} == {"data: [DONE]"}
    assert all('"finish_reason":"length"' in lines[-2] for lines in streams)


@pytest.mark.slow
def test_more_than_there_is_room_for_are_told_when_to_come_again(start_gateway):
    gateway = start_gateway("--max-running", "1", "--max-waiting", "1")
    with gateway.client() as http:
        endless = request_of({**QUESTION, "max_tokens": 4000, "ignore_eos": True, "stream": True})
        first, second = (socket.create_connection(address(gateway), timeout=20) for _ in range(2))
        with first, second:
            first.sendall(endless)
            until(lambda: running(http) == 1)
            second.sendall(endless)
            until(lambda: "symphony_gateway_waiting 1\n" in http.get("/metrics").text)
            refused = http.post(CHAT, json=QUESTION)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert http.post("/v1/messages", json={**QUESTION}).json()["error"]["type"] == "rate_limit_error"
        until(lambda: running(http) == 0)
        assert http.post(CHAT, json=QUESTION).status_code == 200
