"""Costs of a request: charged to its key however it ends, and bounded before any of it is read."""

import json
import socket
import time
from contextlib import suppress
from urllib.parse import urlsplit

import anyio
import pytest
from anyio.lowlevel import checkpoint

import libsym as sym
from lips.gateway import engine
from lips.gateway.asgi import Exchange
from lips.gateway.keys import new_key
from tests.lips.gateway.conftest import Gateway
from tests.symphony.daemons import Daemon

LARGE = 8 << 20
WORDS = [{"role": "user", "content": "word " * 200}]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    daemon = Daemon(tmp_path_factory.mktemp("costs"), "--model", "tiny", "--kv-memory", "64M")
    try:
        yield daemon
        assert daemon.stop() == 0, daemon.log.read_text()
    finally:
        daemon.clean_up()


@pytest.fixture(scope="module")
def client_of(tiny):
    """Clients of one gateway, each with a new key whose line of the file goes on with these limits."""
    path = tiny.mount.parent / "keys"
    path.touch(0o600)
    gateway = Gateway(tiny, "--keys", str(path))

    def client(limits=""):
        key, line = new_key(f"key{len(path.read_text())}")
        with path.open("a") as file:
            file.write(f"{line} {limits}\n")
        return gateway.client(key)

    try:
        yield client
        assert "Traceback" not in gateway.stop()
    finally:
        gateway.process.kill()
        gateway.process.wait()


def test_each_request_with_a_body_is_counted(client_of):
    for path, body, status in (
        ("/v1/chat/completions", "no JSON", 400),
        ("/tokenize", '{"prompt": "x"}', 200),
        ("/detokenize", '{"tokens": [65]}', 200),
        ("/v1/messages/count_tokens", json.dumps({"messages": WORDS}), 200),
        ("/v1/completions", '{"prompt": ["x", "y"], "max_tokens": 1}', 200),
    ):
        with client_of("rate=3") as client:
            found = [client.post(path, content=body).status_code for _ in range(4)]
            assert found == [status] * 3 + [429], path


def test_what_is_computed_or_gone_through_is_charged(client_of):
    for path, body in (
        ("/tokenize", {"prompt": "a" * (200 << 10)}),
        ("/v1/completions", {"prompt": "word " * 100, "max_tokens": 0, "echo": True, "logprobs": 0}),
        ("/v1/completions", {"prompt": "word " * 100, "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": WORDS, "max_tokens": 1, "conversation": "x"}),
    ):
        with client_of("tokens=100") as client:
            assert client.post(path, json=body).status_code == 200
            refused = client.post(path, json=body)
            assert refused.status_code == 429, path
            assert "100 tokens a minute" in refused.json()["error"]["message"]


def test_bodies_are_refused_before_they_are_read_and_their_clients_are_told(client_of):
    with client_of("rate=1") as client:
        assert client.post("/tokenize", json={"prompt": "x"}).status_code == 200
        for num_bytes in (10, 100 << 10, LARGE):
            refused = client.post("/tokenize", content=b" " * num_bytes)
            assert refused.status_code == 429, "also where the answer is there before all of the body is sent"
            assert int(refused.headers["retry-after"]) > 1


def test_the_bodies_of_a_key_have_so_many_bytes_at_once(client_of):
    with client_of() as client, client_of() as other:
        where = urlsplit(str(client.base_url))
        head = f"POST /tokenize HTTP/1.1\r\nhost: x\r\nauthorization: {client.headers['authorization']}\r\n"
        head += f"content-length: {LARGE}\r\n\r\n{{"
        begun = [socket.create_connection((where.hostname, where.port), timeout=60) for _ in range(8)]
        for each in begun:
            each.sendall(head.encode())
        end_s = time.monotonic() + 30
        while client.post("/tokenize", json={"prompt": "x"}).status_code != 429:
            assert time.monotonic() < end_s, "64 MiB are said to be on their way"
        assert other.post("/tokenize", json={"prompt": "x"}).status_code == 200
        for each in begun:
            each.close()
        while client.post("/tokenize", json={"prompt": "x"}).status_code != 200:
            assert time.monotonic() < end_s, "what has ended is held no more"


def test_what_a_dropped_prompt_has_computed_is_charged_and_what_was_refused_only_as_far_as_it_came(tiny):
    charged = []

    async def scenario():
        await sym.aio.connect(str(tiny.socket))
        async with await sym.aio.kv_create() as kv:
            with anyio.CancelScope() as scope:
                async with engine._charged(charged.append, kv, 0, lambda: 500):
                    scope.cancel()
                    await checkpoint()
            with suppress(sym.Invalid):
                async with engine._charged(charged.append, kv, 0, lambda: 500):
                    await sym.aio.kv_write(kv, [65] * 7)
                    await sym.aio.generate(kv, [-1])
            async with engine._charged(charged.append, kv, 7, lambda: 3):
                await sym.aio.kv_write(kv, [65] * 3)

    anyio.run(scenario)
    sym.close()
    assert charged == [500, 7, 3]


@pytest.mark.parametrize("is_endless", [False, True])
def test_an_answer_to_a_body_that_nobody_reads_is_sent_and_the_rest_of_the_body_dropped(monkeypatch, is_endless):
    """Hypercorn makes the end of an answer wait until a full queue has room for one more message."""
    monkeypatch.setattr("lips.gateway.asgi.LINGERS_S", 0.2)
    sent = []

    async def scenario():
        to, messages = anyio.create_memory_object_stream(2)

        async def body():
            num_left = 5
            while is_endless or num_left:
                num_left -= 1
                if ended.is_set():
                    return
                await to.send({"type": "http.request", "body": b"x", "more_body": is_endless or num_left > 0})

        async def send(message):
            sent.append(message)
            if not message.get("more_body", False):
                ended.set()
                await to.send({"type": "http.disconnect"})

        ended = anyio.Event()
        exchange = Exchange(messages.receive, send)
        with anyio.fail_after(5), to, messages:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(body)
                await exchange.send({"type": "http.response.body", "body": b"refused"})

    anyio.run(scenario)
    assert sent == [
        {"type": "http.response.body", "body": b"refused", "more_body": True},
        {"type": "http.response.body", "body": b""},
    ]
