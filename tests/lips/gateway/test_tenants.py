"""Keys: who is answered, and that none learns of another's, not even by how long an answer takes."""

import json
import statistics
import time

import pytest

from lips.gateway.keys import KeyFile, KeyFileError, new_key, parse
from tests.lips.gateway.conftest import Gateway
from tests.symphony.daemons import Daemon

CHAT = "/v1/chat/completions"
PROMPT = "Remember these words: " + " ".join(f"word{number}" for number in range(100))

pytestmark = pytest.mark.slow


@pytest.fixture
def two(start_gateway, tmp_path):
    """A gateway with the keys of Ann and Bob; Ann's rates are bounded."""
    keys, lines = {}, []
    for name, more in (("ann", ""), ("bob", ""), ("few", " rate=3 concurrent=1")):
        keys[name], line = new_key(name)
        lines.append(line + more)
    path = tmp_path / "keys"
    path.write_text("# of the test\n\n" + "\n".join(lines) + "\n")
    path.chmod(0o600)
    return start_gateway("--keys", str(path)), keys, path


def ask(client, text=PROMPT, **more):
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1, "temperature": 0, **more}
    began_s = time.perf_counter()
    answer = client.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"], time.perf_counter() - began_s


def test_only_a_key_that_is_known_is_answered(two):
    gateway, keys, _ = two
    for headers in ({}, {"authorization": "Bearer sk-sym-wrong"}, {"authorization": keys["ann"]}, {"x-api-key": "x"}):
        with gateway.client() as client:
            for path in ("/v1/models", "/sessions", "/live", "/metrics"):
                assert client.get(path, headers=headers).status_code == 401
            refused = client.post(CHAT, json={}, headers=headers)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
            assert refused.headers["www-authenticate"] == "Bearer"
    with gateway.client() as client:
        assert client.get("/v1/models", headers={"x-api-key": keys["ann"]}).status_code == 200
        assert client.get("/health").status_code == 200, "which tells nothing"


def test_the_same_key_hits_and_another_does_not_and_takes_as_long_as_if_nobody_had_asked(two):
    gateway, keys, _ = two
    with gateway.client(keys["ann"]) as ann, gateway.client(keys["bob"]) as bob:
        cold, warm, others = [], [], []
        for number in range(5):
            text = f"{number} {PROMPT}"
            hit, took_s = ask(ann, text)
            assert hit < 40, "no more than how every prompt begins"
            cold.append(took_s)
            hit, took_s = ask(ann, text)
            assert hit > 200
            warm.append(took_s)
            hit, took_s = ask(bob, text)
            assert hit < 40
            others.append(took_s)
        assert statistics.median(others) > 2 * statistics.median(warm), "Bob's took the time of computing"


def test_neither_sees_the_others_conversations(two):
    gateway, keys, _ = two
    with gateway.client(keys["ann"]) as ann, gateway.client(keys["bob"]) as bob:
        ask(ann, "My secret is 7.", conversation="mine")
        response = ann.post("/v1/responses", json={"model": "x", "input": "Hi.", "max_output_tokens": 2}).json()
        assert [each["name"] for each in ann.get("/sessions").json()["sessions"]] == ["mine"]
        assert bob.get("/sessions").json()["sessions"] == []
        assert bob.get("/sessions/mine").status_code == 404
        assert bob.get(f"/v1/responses/{response['id']}").status_code == 404
        assert bob.post(f"/v1/responses/{response['id']}/cancel").status_code == 404
        continued = {"model": "x", "input": "And?", "previous_response_id": response["id"]}
        assert bob.post("/v1/responses", json=continued).status_code == 404
        assert bob.get("/sessions/..%2f..%2fann%2fsessions%2fmine").status_code in {400, 404}
    assert (gateway.files / "ann" / "sessions" / "mine.kv").exists(), "in a domain of Ann's"


def test_who_comes_second_in_a_conversation_of_a_key_is_told_of_no_process(two):
    gateway, keys, _ = two
    body = {"messages": [{"role": "user", "content": "Count."}], "conversation": "busy", "max_tokens": 3000}
    with (
        gateway.client(keys["ann"]) as ann,
        gateway.client(keys["ann"]) as other,
        ann.stream("POST", CHAT, json={**body, "ignore_eos": True, "stream": True}) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        refused = other.post(CHAT, json=body)
        assert refused.status_code == 409
        assert "busy is being answered" in refused.text
        assert "pid" not in refused.text


def test_tokens_are_counted_also_of_a_client_that_goes_away(start_gateway, tmp_path):
    key, line = new_key("tokens")
    path = tmp_path / "keys"
    path.write_text(f"{line} tokens=300\n")
    path.chmod(0o600)
    with start_gateway("--keys", str(path)).client(key) as client:
        body = {
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": 500,
            "stream": True,
            "ignore_eos": True,
        }
        with client.stream("POST", CHAT, json=body) as answer:
            next(answer.iter_lines())  # it is closed at once
        end_s = time.monotonic() + 20
        while (refused := client.post(CHAT, json={**body, "max_tokens": 1, "stream": False})).status_code == 200:
            assert time.monotonic() < end_s
        assert refused.status_code == 429
        assert "tokens a minute" in refused.json()["error"]["message"]


def test_rates_are_kept_and_say_when_to_come_again(two):
    gateway, keys, _ = two
    with gateway.client(keys["few"]) as few, gateway.client(keys["bob"]) as bob:
        for _ in range(3):
            ask(few, "Hi.")
        refused = few.post(CHAT, json={"messages": [{"role": "user", "content": "Hi."}]})
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 21
        assert "3 requests a minute" in refused.json()["error"]["message"]
        ask(bob, "Hi.")


def test_a_list_of_prompts_is_one_request(two):
    gateway, keys, _ = two
    with gateway.client(keys["few"]) as few:
        for _ in range(3):
            body = {"prompt": ["One", "Two", "Three", "Four", "Five"], "max_tokens": 1, "echo": True, "logprobs": 0}
            assert len(few.post("/v1/completions", json=body).json()["choices"]) == 5
        assert few.post("/v1/completions", json=body).status_code == 429


def test_a_file_that_changes_is_read_again(two):
    gateway, keys, path = two
    key, line = new_key("new")
    with gateway.client(key) as client:
        assert client.get("/v1/models").status_code == 401
        path.write_text(line + "\n")
        assert client.get("/v1/models").status_code == 200
    with gateway.client(keys["ann"]) as client:
        assert client.get("/v1/models").status_code == 401, "her line is gone"
    with gateway.client(key) as client:
        path.write_text("no key at all\n")
        assert client.get("/v1/models").status_code == 200, "a file with a fault changes nothing"
        path.write_text("")
        assert client.get("/v1/models").status_code == 401


def test_a_quota_is_a_keys_own(start_gateway, tmp_path):
    key, line = new_key("small")
    path = tmp_path / "keys"
    path.write_text(f"{line} quota=12M\n")
    path.chmod(0o600)
    gateway = start_gateway("--keys", str(path))
    with gateway.client(key) as client:
        for number in range(4):
            ask(client, f"{number} Say {'something ' * 100}")  # older ones make room
        refused = client.post(CHAT, json={"messages": [{"role": "user", "content": "word " * 800}]})
        assert refused.status_code == 429, refused.text
        assert refused.json()["error"]["code"] == "insufficient_quota"
        path.write_text(f"{line} quota=512M\n")
        ask(client, "word " * 800)
        told = client.get("/live").json()
        assert told["prompt_tokens"] > 800
        assert "steps" not in told, "they are the others' as well"


def test_a_second_try_computes_the_prompt_once(start_gateway, tmp_path):
    """The first finds no room for the answers' pages, with the prompt computed; then what is cached makes room."""
    made = [new_key(f"again{number}") for number in range(9)]
    path = tmp_path / "keys"
    path.write_text("".join(f"{line} quota=10M\n" for _, line in made))
    path.chmod(0o600)
    gateway = start_gateway("--keys", str(path))
    body = {"messages": [{"role": "user", "content": "word " * 150}], "n": 2, "max_tokens": 3, "temperature": 0}
    texts = set()
    for number, (key, _) in enumerate(made):
        with gateway.client(key) as client:
            if number:
                ask(client, "thing " * 16 * number)
            answer = client.post(CHAT, json=body)
            assert answer.status_code == 200, answer.text
            texts |= {each["message"]["content"] for each in answer.json()["choices"]}
    assert len(texts) == 1, texts


@pytest.mark.parametrize("more", [{}, {"conversation": "full"}, {"session_id": "full"}, {"n": 2}])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_fills_the_quota_is_given_as_one_that_its_length_ended(start_gateway, tmp_path, more, stream):
    key, line = new_key(f"full-{stream}-{''.join(more)}")  # each has its own domain
    path = tmp_path / "keys"
    path.write_text(f"{line} quota=8M\n")
    path.chmod(0o600)
    gateway = start_gateway("--keys", str(path))
    body = {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 3000, "ignore_eos": True, **more}
    with gateway.client(key) as client:
        answer = client.post(CHAT, json={**body, "stream": stream, "temperature": 0})
        assert answer.status_code == 200, answer.text
        if stream:
            events = [json.loads(each[6:]) for each in answer.text.splitlines() if each.startswith("data: {")]
            assert not [each for each in events if "error" in each], answer.text[-500:]
            choices = [each["choices"][0] for each in events if each["choices"]]
            said = "".join(each["delta"].get("content") or "" for each in choices)
            finish = [each["finish_reason"] for each in choices if each["finish_reason"]]
        else:
            choices = answer.json()["choices"]
            said, finish = choices[0]["message"]["content"], [each["finish_reason"] for each in choices]
        assert len(said) > 100
        assert finish == ["length"] * more.get("n", 1)
        if "n" not in more and more:
            (kept,) = [each["content"] for each in client.get("/sessions/full").json()["messages"]][-1:]
            at = said.rfind(kept)  # the model goes on with messages of its own
            assert at >= 0
            assert at + len(kept) > len(said) - 20


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ann", "line 1: sha256"),
        ("ann sha256:zz", "line 1: sha256"),
        (f"# x\nann sha256:{'0' * 64}\nann sha256:{'1' * 64}", "line 3: there is a key ann"),
        (f"ann sha256:{'0' * 64}\nbob sha256:{'0' * 64}", "line 2: this digest"),
        (f"local sha256:{'0' * 64}", "line 1: 'local' is no name"),
        (f"../x sha256:{'0' * 64}", "is no name"),
        (f"ann sha256:{'0' * 64} quota=much", "quota=much"),
        (f"ann sha256:{'0' * 64} rate=0", "rate=0"),
        (f"ann sha256:{'0' * 64} speed=9", "speed=9"),
    ],
)
def test_a_line_that_is_none_is_named(text, says):
    with pytest.raises(KeyFileError, match=r".*") as refused:
        parse(text, "keys")
    assert says in str(refused.value)


def test_a_file_that_others_may_read_is_refused(tmp_path):
    path = tmp_path / "keys"
    path.write_text("")
    path.chmod(0o644)
    with pytest.raises(KeyFileError, match="chmod 600"):
        KeyFile(path)


def test_a_daemon_that_is_started_again_is_found_again(tmp_path_factory):
    directory = tmp_path_factory.mktemp("again")
    daemon = Daemon(directory, "--model", "tiny")
    gateway = Gateway(daemon)
    try:
        with gateway.client() as client:
            ask(client, "Hello.", conversation="kept")
            assert daemon.stop() == 0
            gateway.until_it_says("the daemon has gone")
            assert client.get("/health").status_code == 503
            refused = client.post(CHAT, json={"messages": [{"role": "user", "content": "x"}]})
            assert refused.status_code == 503
            assert str(directory) not in refused.text
            daemon = Daemon(directory, "--model", "tiny")
            assert "tiny" in gateway.until_it_says("the daemon is back")
            assert client.get("/health").status_code == 200
            hit, _ = ask(client, "And now?", conversation="kept")
            assert hit > 0, "the conversation is a file, and so still there"
        assert "Traceback" not in gateway.stop()
    finally:
        gateway.process.kill()
        daemon.clean_up()


HELD = """
import anyio
import libsym as sym
from lips.gateway.tenants import Tenant

async def main():
    tenant = Tenant("ann", "", None, None, 1000, None, int)
    await sym.aio.kv_close(await sym.aio.kv_create("a.kv"))
    lock = sym.aio.kv_lock

    async def locked(kv, **options):
        await lock(kv, **options)
        scope.cancel()
        await anyio.lowlevel.checkpoint()

    sym.aio.kv_lock = locked
    with anyio.CancelScope() as scope:
        try:
            async with tenant.talking("a.kv"):
                raise AssertionError("the turn was cancelled before")
        except BaseException as error:
            kept = error  # as a server does for a while: its traceback has the frame, and that the file
            raise
    await lock(await sym.aio.kv_open("a.kv", "rw"), blocking=False)

sym.main(main)
"""


def test_a_client_that_goes_before_its_turn_begins_leaves_no_lock(gateway_daemon):
    gateway_daemon.run(HELD)
