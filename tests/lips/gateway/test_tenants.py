"""Keys: who is answered, and that none learns of another's, not even by how long an answer takes."""

import itertools

import pytest

import libsym as sym
from lips.gateway.keys import KeyFile, KeyFileError, new_key, parse
from tests.decoder.small_checkpoints import TEMPLATE, gguf_metadata, write_gguf
from tests.lips.gateway.conftest import Keyed, gateways
from tests.lips.gateway.wire import CHAT, ENDLESS, RESPONSES, cached, events_of, post, streaming, user
from tests.symphony.daemons import Daemon, a_daemon

PROMPT = "Remember these words: " + " ".join(f"word{number}" for number in range(100))
names = map("tenant{}".format, itertools.count())

pytestmark = pytest.mark.slow


def ask(client, text=PROMPT, **more):
    return post(client, CHAT, {"messages": user(text), "max_tokens": 1, "temperature": 0, **more})["usage"]


@pytest.fixture
def two(keyed):
    """The clients of two keys, and the directory of the first one's files."""
    name = next(names)
    with keyed.client(name=name) as ann, keyed.client() as bob:
        yield ann, bob, keyed.gateway.files / name


def test_only_a_key_that_is_known_is_answered(keyed):
    key = keyed.key()
    with keyed.gateway.client() as client:
        for headers in ({}, {"authorization": "Bearer sk-sym-wrong"}, {"authorization": key}, {"x-api-key": "x"}):
            for path in ("/v1/models", "/sessions", "/live", "/metrics"):
                assert client.get(path, headers=headers).status_code == 401
            refused = client.post(CHAT, json={}, headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
            assert refused.headers["www-authenticate"] == "Bearer"
        assert client.get("/v1/models", headers={"x-api-key": key}).status_code == 200
        assert client.get("/health").status_code == 200, "which tells nothing"


def test_the_same_key_hits_and_another_computes_as_if_nobody_had_asked(two, gateway_daemon):
    ann, bob, _ = two

    def computed_by(client, text):
        with sym.connection(str(gateway_daemon.socket)).use():
            before = sym.daemon_stat()["num_tokens"]
            hit = cached(ask(client, text))
            return hit, sym.daemon_stat()["num_tokens"] - before

    (cold_hit, cold), (warm_hit, warm), (other_hit, other) = (computed_by(each, PROMPT) for each in (ann, ann, bob))
    assert max(cold_hit, other_hit) < 40, "no more than how every prompt begins"
    assert warm_hit > 200
    assert warm < 20
    assert other > 200
    assert abs(other - cold) < 40


def test_neither_sees_the_others_conversations(two):
    ann, bob, files = two
    ask(ann, "My secret is 7.", conversation="mine")
    response = post(ann, RESPONSES, model="x", input="Hi.", max_output_tokens=2)["id"]
    assert [each["name"] for each in ann.get("/sessions").json()["sessions"]] == ["mine"]
    assert bob.get("/sessions").json()["sessions"] == []
    assert bob.get("/sessions/mine").status_code == 404
    assert bob.get(f"{RESPONSES}/{response}").status_code == 404
    assert bob.post(f"{RESPONSES}/{response}/cancel").status_code == 404
    post(bob, RESPONSES, model="x", input="And?", previous_response_id=response, status=404)
    assert bob.get(f"/sessions/..%2f..%2f{files.name}%2fsessions%2fmine").status_code in {400, 404}
    assert (files / "sessions" / "mine.kv").exists(), "in a domain of Ann's"


def test_who_comes_second_in_a_conversation_of_a_key_is_told_of_no_process(two):
    body = {**ENDLESS, "conversation": "busy"}
    with streaming(two[0], body):
        refused = post(two[0], CHAT, body, status=409)["error"]["message"]
    assert "busy is being answered" in refused
    assert "pid" not in refused


def test_a_file_that_changes_is_read_again(gateway_daemon, tmp_path):
    with gateways(gateway_daemon) as start:
        keyed = Keyed(start, tmp_path / "keys")
        ann, (key, line) = keyed.client(), new_key("new")
        with ann, keyed.gateway.client(key) as client:
            for text, statuses in (
                (keyed.path.read_text(), (200, 401)),
                (f"{line}\n", (401, 200)),
                ("no key at all\n", (401, 200)),  # a file with a fault changes nothing
                ("", (401, 401)),
            ):
                keyed.path.write_text(text)
                assert tuple(each.get("/v1/models").status_code for each in (ann, client)) == statuses, text


def test_a_quota_is_a_keys_own(keyed):
    with keyed.client("quota=12M") as client:
        for number in range(4):
            ask(client, f"{number} Say {'something ' * 100}")  # older ones make room
        refused = post(client, CHAT, messages=user("word " * 800), status=429)
        assert refused["error"]["code"] == "insufficient_quota"
        keyed.path.write_text(keyed.path.read_text().replace("quota=12M", "quota=512M"))
        ask(client, "word " * 800)
        told = client.get("/live").json()
        assert told["prompt_tokens"] > 800
        assert "steps" not in told, "they are the others' as well"


def test_a_second_try_computes_the_prompt_once(keyed):
    """The first finds no room for the answers' pages, with the prompt computed; then what is cached makes room."""
    body = {"messages": user("word " * 150), "n": 2, "max_tokens": 3, "temperature": 0}
    texts = set()
    for number in range(9):
        with keyed.client("quota=10M") as client:
            if number:
                ask(client, "thing " * 16 * number)
            texts |= {each["message"]["content"] for each in post(client, CHAT, body)["choices"]}
    assert len(texts) == 1, texts


@pytest.mark.parametrize(
    ("more", "stream"),
    [
        ({}, True),
        ({"conversation": "full"}, True),
        ({"session_id": "full"}, False),
        ({"n": 2}, False),
        ({"n": 2}, True),
    ],
)
def test_an_answer_that_fills_the_quota_is_given_as_one_that_its_length_ended(keyed, more, stream):
    with keyed.client("quota=4M") as client:
        answer = client.post(CHAT, json={**ENDLESS, "temperature": 0, **more, "stream": stream})
        assert answer.status_code == 200, answer.text
        if stream:
            events = events_of(answer.text)
            assert not [each for each in events if "error" in each], answer.text[-500:]
            choices = [each["choices"][0] for each in events if each["choices"]]
            said = "".join(each["delta"].get("content") or "" for each in choices)
        else:
            choices = answer.json()["choices"]
            said = choices[0]["message"]["content"]
        assert len(said) > 100
        ends = [each["finish_reason"] for each in choices if each["finish_reason"]]
        assert ends == ["length"] * more.get("n", 1)
        if "full" in more.values():
            kept = client.get("/sessions/full").json()["messages"][-1]["content"]
            at = said.rfind(kept)  # the model goes on with messages of its own
            assert at >= 0
            assert at + len(kept) > len(said) - 20


ZEROS = f"ann sha256:{'0' * 64}"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ann", "line 1: sha256"),
        ("ann sha256:zz", "line 1: sha256"),
        (f"# x\n{ZEROS}\nann sha256:{'1' * 64}", "line 3: there is a key ann"),
        (f"{ZEROS}\nbob{ZEROS[3:]}", "line 2: this digest"),
        (f"local{ZEROS[3:]}", "line 1: 'local' is no name"),
        (f"../x{ZEROS[3:]}", "is no name"),
        *[(f"{ZEROS} {limit}", limit) for limit in ("quota=much", "rate=0", "speed=9")],
    ],
)
def test_a_line_that_is_none_is_named(text, says):
    with pytest.raises(KeyFileError) as refused:
        parse(text, "keys")
    assert says in str(refused.value)


def test_a_file_that_others_may_read_is_refused(tmp_path):
    path = tmp_path / "keys"
    path.touch(0o644)
    with pytest.raises(KeyFileError, match="chmod 600"):
        KeyFile(path)


def test_a_daemon_that_is_started_again_is_found_again(tmp_path):
    with a_daemon(tmp_path, "--model", "tiny") as daemon, gateways(daemon) as start:
        gateway = start()
        with gateway.client() as client:
            ask(client, "Hello.", conversation="kept")
            assert daemon.stop() == 0
            gateway.until_it_says("the daemon has gone")
            assert client.get("/health").status_code == 503
            refused = client.post(CHAT, json={"messages": user("x")})
            assert refused.status_code == 503
            assert str(tmp_path) not in refused.text
            daemon.process = Daemon(tmp_path, "--model", "tiny").process
            assert "tiny" in gateway.until_it_says("the daemon is back")
            assert client.get("/health").status_code == 200
            hit = cached(ask(client, "And now?", conversation="kept"))
            assert hit > 0, "the conversation is a file, and so still there"


def test_tools_are_told_as_the_template_of_a_new_model_of_the_same_name_needs(tmp_path):
    knows = gguf_metadata() | {"tokenizer.chat_template": "{{ tools | tojson }}" + TEMPLATE}
    first, second = (
        f"chat={write_gguf(tmp_path / name, data)}" for name, data in (("a.gguf", knows), ("b.gguf", None))
    )
    question = {"messages": user("Hi"), "max_tokens": 1}
    tool = {"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}}
    with a_daemon(tmp_path, "--model", first) as daemon, gateways(daemon) as start:
        gateway = start()
        with gateway.client() as client:
            assert client.post(CHAT, json={**question, "tools": [tool]}).status_code == 200
            assert daemon.stop() == 0
            gateway.until_it_says("the daemon has gone")
            daemon.process = Daemon(tmp_path, "--model", second).process
            gateway.until_it_says("the daemon is back")
            plain, told = (
                client.post(CHAT, json={**question, **more}).json()["usage"]["prompt_tokens"]
                for more in ({}, {"tools": [tool]})
            )
            assert told > plain, "a template that knows no tools leaves them to the system message"


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
