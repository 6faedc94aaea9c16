"""Requests, streams and waits that the gateway's tests share."""

import contextlib
import json
import time

import libsym as sym

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
QUESTION = {"messages": [{"role": "user", "content": "Count from one to a thousand."}], "max_tokens": 8}
ENDLESS = {**QUESTION, "max_tokens": 3000, "ignore_eos": True}


def user(text):
    return [{"role": "user", "content": text}]


def post(http, route, body=None, *, status=200, **more):
    """The JSON of an answer, which has this status."""
    answer = http.post(route, json={**(body or {}), **more})
    assert answer.status_code == status, answer.text
    return answer.json()


def events_of(text):
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@contextlib.contextmanager
def streaming(http, body, num_lines=1, route=CHAT):
    """The lines of a stream, of which so many have come. Its end closes the connection."""
    with http.stream("POST", route, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        lines = answer.iter_lines()
        for _ in range(num_lines):
            next(lines)
        yield lines


def figure(http, name):
    return int(http.get("/metrics").text.partition(f"\nsymphony_gateway_{name} ")[2].partition("\n")[0])


def running(http):
    return figure(http, "running")


def cached(usage):
    return usage["prompt_tokens_details"]["cached_tokens"]


def until(condition, limit_s=60):
    """Wait for something that the gateway does behind an answer, or that is not there yet."""
    end_s = time.monotonic() + limit_s
    while True:
        with contextlib.suppress(AssertionError, FileNotFoundError, sym.WouldBlock):
            if condition():
                return
        assert time.monotonic() < end_s, "it did not come true"
        time.sleep(0.02)
