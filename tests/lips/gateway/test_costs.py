"""Costs of a request: charged to its key however it ends, and bounded before any of it is read."""

import contextlib

import anyio
import pytest
from anyio.lowlevel import checkpoint

import libsym as sym
from lips.gateway import engine
from lips.gateway.asgi import Exchange
from tests.lips.gateway.test_odd_clients import connected, head
from tests.lips.gateway.wire import CHAT, COMPLETIONS, MESSAGES, post, until, user

LARGE = 8 << 20
WORDS = {"messages": user("word " * 200)}
SCORED = {"prompt": "word " * 100, "max_tokens": 0, "echo": True, "logprobs": 0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (CHAT, {}, 400),
        ("/tokenize", {"prompt": "x"}, 200),
        ("/detokenize", {"tokens": [65]}, 200),
        (f"{MESSAGES}/count_tokens", WORDS, 200),
        (COMPLETIONS, {"prompt": ["One", "Two", "Three"], "max_tokens": 1}, 200),
        (COMPLETIONS, {**SCORED, "prompt": ["One", "Two", "Three", "Four"]}, 200),
    ],
)
def test_each_request_with_a_body_is_counted_once(keyed, path, body, status):
    with keyed.client("rate=3") as client:
        answers = [client.post(path, json=body) for _ in range(4)]
    assert [answer.status_code for answer in answers] == [status] * 3 + [429]
    assert 1 <= int(answers[-1].headers["retry-after"]) <= 21
    assert "3 requests a minute" in answers[-1].json()["error"]["message"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a" * (200 << 10)}),
        (COMPLETIONS, SCORED),
        (COMPLETIONS, {"prompt": "word " * 100, "max_tokens": 1}),
        (CHAT, {**WORDS, "max_tokens": 1, "conversation": "x"}),
    ],
)
def test_what_is_computed_or_gone_through_is_charged(keyed, path, body):
    with keyed.client("tokens=10") as client:  # what the first request takes comes back in nine minutes
        post(client, path, body)
        assert "10 tokens a minute" in post(client, path, body, status=429)["error"]["message"]


def test_bodies_are_refused_before_they_are_read_and_their_clients_are_told(keyed):
    with keyed.client("rate=1") as client:
        post(client, "/tokenize", prompt="x")
        for num_bytes in (10, 100 << 10, LARGE):
            refused = client.post("/tokenize", content=b" " * num_bytes)
            assert refused.status_code == 429, "also where the answer is there before all of the body is sent"
            assert int(refused.headers["retry-after"]) > 1


def test_the_bodies_of_a_key_have_so_many_bytes_at_once(keyed):
    def status(client):
        return client.post("/tokenize", json={"prompt": "x"}).status_code

    with keyed.client() as client, keyed.client() as other, contextlib.ExitStack() as begun:
        fields = (f"authorization: {client.headers['authorization']}", f"content-length: {LARGE}")
        for _ in range(8):
            begun.enter_context(connected(keyed.gateway, head(*fields, path="/tokenize") + b"{"))
        until(lambda: status(client) == 429)  # 64 MiB are said to be on their way
        assert status(other) == 200
        begun.close()
        until(lambda: status(client) == 200)  # what has ended is held no more


async def test_what_a_dropped_prompt_has_computed_is_charged_and_what_was_refused_only_as_far_as_it_came(
    gateway_daemon,
):
    charged = list[int]()
    await sym.aio.connect(str(gateway_daemon.socket))
    async with await sym.aio.kv_create() as kv:
        with anyio.CancelScope() as scope:
            async with engine._charged(charged.append, kv, 0, lambda: 500):
                scope.cancel()
                await checkpoint()
        with contextlib.suppress(sym.Invalid):
            async with engine._charged(charged.append, kv, 0, lambda: 500):
                await sym.aio.kv_write(kv, [65] * 7)
                await sym.aio.generate(kv, [-1])
        async with engine._charged(charged.append, kv, 7, lambda: 3):
            await sym.aio.kv_write(kv, [65] * 3)
    sym.close()
    assert charged == [500, 7, 3]


@pytest.mark.parametrize("is_endless", [False, True])
async def test_an_answer_to_a_body_that_nobody_reads_is_sent_and_the_rest_of_the_body_dropped(monkeypatch, is_endless):
    """Hypercorn makes the end of an answer wait until a full queue has room for one more message."""
    monkeypatch.setattr("lips.gateway.asgi.LINGERS_S", 0.2)
    sent, refusal = [], {"type": "http.response.body", "body": b"refused"}
    to, messages = anyio.create_memory_object_stream[dict[str, object]](2)
    ended = anyio.Event()

    async def body():
        num_left = 5
        while (is_endless or num_left) and not ended.is_set():
            num_left -= 1
            await to.send({"type": "http.request", "body": b"x", "more_body": is_endless or num_left > 0})

    async def send(message):
        sent.append(message)
        if not message.get("more_body", False):
            ended.set()
            await to.send({"type": "http.disconnect"})

    exchange = Exchange(messages.receive, send)
    with anyio.fail_after(60), to, messages:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(body)
            await exchange.send(refusal)
    assert sent == [{**refusal, "more_body": True}, {**refusal, "body": b""}]
