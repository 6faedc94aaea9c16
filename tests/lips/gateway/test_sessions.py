"""Conversations as files: by name, listed, forked in a shell, undone, exported; and what their turns cost."""

import contextlib
import fcntl
import json
import os
import re
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import anyio
import httpx
import pytest

import libsym as sym
from lips.gateway.engine import _save
from lips.gateway.places import Place
from lips.gateway.tenants import make_tenant

CHAT = "/v1/chat/completions"


def say(http, text, conversation, **options):
    body = {"messages": [{"role": "user", "content": text}], "conversation": conversation, "max_tokens": 10}
    answer = http.post(CHAT, json={**body, "temperature": 0, **options})
    assert answer.status_code == 200, answer.text
    return answer.json()


def until(done):
    """Wait until something that the gateway does behind an answer has been done."""
    end_s = time.monotonic() + 30
    while True:
        try:
            if done():
                return
        except (AssertionError, FileNotFoundError, sym.WouldBlock):
            pass
        assert time.monotonic() < end_s
        time.sleep(0.02)


def files(gateway):
    return gateway.files / "local" / "sessions"


def names(http):
    return {each["name"] for each in http.get("/sessions").json()["sessions"]}


@pytest.fixture(autouse=True)
def forgotten(gateway, http):
    """No conversations of other tests."""
    http.get("/sessions")  # the first request makes the directory
    for path in files(gateway).iterdir():
        path.unlink()


def test_a_conversation_is_a_file_that_a_shell_lists_forks_and_a_client_talks_to(gateway, http):
    first = say(http, "My name is Ann.", "ann")
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    subprocess.run(["cp", files(gateway) / "ann.kv", files(gateway) / "copy.kv"], check=True)
    original, copy = say(http, "And what is yours?", "ann"), say(http, "And what is yours?", "copy")
    assert copy["choices"] == original["choices"], "both know the same"
    before = first["usage"]["total_tokens"]
    assert copy["usage"]["prompt_tokens_details"]["cached_tokens"] == before, "not a token was computed again"
    assert names(http) == {"ann", "copy"}
    (files(gateway) / "copy.kv").unlink()
    assert names(http) == {"ann"}


def test_the_tenth_turn_costs_what_is_new_in_it(http):
    told = [say(http, "Tell me more.", "long")["usage"] for _ in range(10)]
    computed = [each["prompt_tokens"] - each["prompt_tokens_details"]["cached_tokens"] for each in told]
    assert len(set(computed[1:])) == 1, "each turn after the first costs the same"
    assert computed[9] < 20 < told[9]["prompt_tokens"]


def test_a_client_that_sends_its_whole_history_computes_only_what_is_new(http):
    messages, computed = [], []
    for _ in range(4):
        messages.append({"role": "user", "content": "Tell me more of that, please."})
        body = {"messages": messages, "max_tokens": 12, "temperature": 0}
        answer = http.post(CHAT, json=body).json()
        usage = answer["usage"]
        computed.append(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])
        messages.append(answer["choices"][0]["message"])
    assert max(computed[1:]) <= 24, computed


@pytest.mark.parametrize(
    ("headers", "more"),
    [({"x-session-id": "mine"}, {}), ({}, {"session_id": "mine"})],
)
def test_a_name_that_a_client_gives_its_session_is_its_files(gateway, http, headers, more):
    body = {"messages": [{"role": "user", "content": "Hello there."}], "max_tokens": 6, "temperature": 0}
    first = http.post(CHAT, json={**body, **more}, headers=headers).json()
    assert (files(gateway) / "mine.kv").exists()
    said = http.get("/sessions/mine").json()["messages"]
    assert said[-2]["content"] == "Hello there."
    assert first["choices"][0]["message"]["content"].startswith(said[-1]["content"])


@pytest.mark.parametrize(
    "name", ["a b", "a/b", "a?b", "a%2fb", "50%", ".hidden", "é" * 60, "long " * 100, "a/export", "q~0123456789abcdef"]
)
def test_a_conversation_of_any_name_is_a_file_of_its_own(http, gateway, name):
    others = {"a b", "a/b", "a%2fb", "a?b"} - {name}
    for each in others:
        say(http, "Hello.", each, max_tokens=2)
    say(http, "First.", name, max_tokens=4)
    assert name in names(http)
    assert len(list(files(gateway).iterdir())) == len(others) + 1
    quoted = quote(name, safe="")
    assert [each["content"] for each in http.get(f"/sessions/{quoted}").json()["messages"]][-2] == "First."
    say(http, "Second.", name, max_tokens=4)
    assert http.post(f"/sessions/{quoted}/undo").json()["removed"] > 0
    assert http.delete(f"/sessions/{quoted}").json() == {"name": name, "deleted": True}
    assert names(http) == others


def test_files_of_before_keep_their_names(http, gateway):
    say(http, "First.", "plain", max_tokens=4)
    (files(gateway) / "plain.kv").rename(files(gateway) / "50%.kv")
    assert names(http) == {"50%"}
    assert say(http, "Second.", "50%", max_tokens=4)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert [each.name for each in files(gateway).iterdir()] == ["50%.kv"]


def test_a_key_of_the_prompt_cache_and_a_completion_leave_a_conversation_of_that_name_alone(http):
    say(http, "First.", "ann")
    before = http.get("/sessions/ann").json()
    body = {"messages": [{"role": "user", "content": "Hello there."}], "max_tokens": 6, "prompt_cache_key": "ann"}
    assert http.post(CHAT, json=body).status_code == 200
    refused = http.post("/v1/completions", json={"prompt": "Once", "max_tokens": 4, "conversation": "ann"})
    assert refused.status_code == 400
    assert "conversation" in refused.json()["error"]["message"]
    assert http.get("/sessions/ann").json() == before
    assert names(http) == {"ann"}


def test_a_system_message_in_a_later_turn_is_the_same_or_a_turn(http):
    def ask(*messages):
        body = {"messages": [{"role": role, "content": text} for role, text in messages], "conversation": "told"}
        return http.post(CHAT, json={**body, "max_tokens": 4, "temperature": 0})

    ask(("system", "You are FOO."), ("user", "One?"))
    ask(("system", "You are FOO."), ("user", "Two?"))
    assert ask(("system", "You are BAR."), ("user", "Three?")).status_code == 200
    text = "\n".join(each["content"] for each in http.get("/sessions/told").json()["messages"])
    assert text.startswith("You are FOO.")
    assert (text.count("You are FOO."), text.count("You are BAR.")) == (1, 1)


def test_the_first_of_several_choices_is_the_session(http):
    body = {"messages": [{"role": "user", "content": "Say a word."}], "max_tokens": 6, "n": 3, "seed": 1}
    answer = http.post(CHAT, json={**body, "session_id": "several"}).json()
    said = http.get("/sessions/several").json()["messages"]
    assert answer["choices"][0]["message"]["content"].startswith(said[-1]["content"])
    assert said[-2]["content"] == "Say a word."


def test_a_repetition_penalty_counts_the_whole_prompt_whatever_is_known_of_it(http):
    body = {"messages": [{"role": "user", "content": "Tell me about the sea, the sand and the sea again."}]}
    body |= {"max_tokens": 24, "temperature": 0, "repetition_penalty": 1.6}
    first, second = (http.post(CHAT, json=body).json() for _ in range(2))
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert second["choices"][0]["message"] == first["choices"][0]["message"]


def test_reading_forking_and_exporting_see_a_conversation_up_to_its_last_ended_turn(http, gateway):
    say(http, "First.", "busy")
    before = http.get("/sessions/busy").json()
    body = {"messages": [{"role": "user", "content": "Count."}], "conversation": "busy", "stream": True}
    with http.stream("POST", CHAT, json={**body, "max_tokens": 3000, "ignore_eos": True}) as answer:
        lines = answer.iter_lines()  # closing it closes the connection
        next(lines)
        with gateway.client() as other:
            assert other.get("/sessions/busy").json() == before
            assert other.post("/sessions/busy/fork", json={"to": "fork"}).status_code == 200
            assert other.get("/sessions/fork").json()["messages"] == before["messages"]
            for number in range(10):
                (files(gateway) / f"{number}.kv").write_bytes(other.get("/sessions/busy/export").content)
                assert other.get(f"/sessions/{number}").json()["messages"] == before["messages"]
            for refused in (other.delete("/sessions/busy"), other.post("/sessions/busy/undo")):
                assert refused.status_code == 409
    assert "busy" in names(http)


def test_a_turn_excludes_other_gateways_and_programs(http, gateway, start_gateway):
    say(http, "First.", "shared")
    before = http.get("/sessions/shared").json()
    body = {"messages": [{"role": "user", "content": "Count."}], "conversation": "shared"}
    other = start_gateway()
    with (
        http.stream("POST", CHAT, json={**body, "stream": True, "max_tokens": 3000, "ignore_eos": True}) as answer,
        other.client() as client,
    ):
        lines = answer.iter_lines()
        for _ in range(20):
            next(lines)
        assert client.get("/sessions/shared").json() == before, "up to the last ended turn"
        client.post("/sessions/shared/fork", json={"to": "fork"})
        (files(gateway) / "exported.kv").write_bytes(client.get("/sessions/shared/export").content)
        for name in ("fork", "exported"):
            assert client.get(f"/sessions/{name}").json()["messages"] == before["messages"]
        assert client.post(CHAT, json={**body, "max_tokens": 2}).status_code == 409
        assert client.delete("/sessions/shared").status_code == 409
        whole = {**body, "conversation": None, "session_id": "shared", "max_tokens": 2}
        assert client.post(CHAT, json=whole).status_code == 200
    assert "First." in [each["content"] for each in http.get("/sessions/shared").json()["messages"]]
    with (
        sym.connection(str(gateway.daemon.socket)).use(),
        sym.kv_open(f"{gateway.files}/local/sessions/shared.kv", "rw") as kv,
    ):
        until(lambda: sym.kv_lock(kv, blocking=False))
        assert http.post(CHAT, json={**body, "max_tokens": 2}).status_code == 409


def test_a_turn_whose_client_goes_leaves_what_it_was_sent(http):
    say(http, "First.", "left")
    before = http.get("/sessions/left").json()
    body = {"messages": [{"role": "user", "content": "Count to a thousand."}], "conversation": "left"}
    body |= {"max_tokens": 3000, "ignore_eos": True, "temperature": 0}
    with pytest.raises(httpx.ReadTimeout):
        http.post(CHAT, json=body, timeout=0.5)
    until(lambda: say(http, "Again.", "left", max_tokens=2))
    assert "Count to a thousand." not in [each["content"] for each in http.get("/sessions/left").json()["messages"]]
    http.post("/sessions/left/undo")
    assert http.get("/sessions/left").json() == before
    sent = ""
    with http.stream("POST", CHAT, json={**body, "stream": True}) as answer:
        lines = answer.iter_lines()
        while len(sent) < 20:
            line = next(lines)
            if line.startswith("data: {"):
                sent += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
    until(lambda: len(http.get("/sessions/left").json()["messages"]) > len(before["messages"]))
    assert http.get("/sessions/left").json()["messages"][-1]["content"].startswith(sent[:20])


def test_the_page_s_routes_fork_undo_export_and_remove(gateway, http):
    say(http, "First.", "a", max_tokens=4)
    before = http.get("/sessions/a").json()
    assert [each["role"] for each in before["messages"]] == ["user", "assistant"]
    say(http, "Second.", "a", max_tokens=4)
    assert http.post("/sessions/a/fork", json={"to": "b"}).json() == {"name": "b"}
    undone = http.post("/sessions/a/undo").json()
    assert undone["tokens"] == before["tokens"]
    assert http.get("/sessions/a").json()["messages"] == before["messages"]
    assert [each["content"] for each in http.get("/sessions/b").json()["messages"]][2] == "Second."
    image = http.get("/sessions/b/export")
    assert image.content == (files(gateway) / "b.kv").read_bytes()
    assert 'filename="b.kv"' in image.headers["content-disposition"]
    (files(gateway) / "c.kv").write_bytes(image.content)
    assert http.get("/sessions/c").json()["messages"] == http.get("/sessions/b").json()["messages"]
    assert http.delete("/sessions/b").json()["deleted"]
    assert names(http) == {"a", "c"}
    live = http.get("/live").json()
    assert live["kv_used_bytes"] > 0
    assert live["running"] == 0


@pytest.mark.parametrize("name", ["%2e%2e", "a%2fb", "%2e%2e%2fx", ".hidden", "x" * 300, "é" * 101, "a%00b"])
def test_names_that_are_none_of_a_file_lead_nowhere(http, name):
    for path in (f"/sessions/{name}", f"/sessions/{name}/export"):
        assert http.get(path).status_code in {400, 404}


def test_what_is_not_there_is_said_so(http):
    assert http.get("/sessions/nobody").status_code == 404
    assert http.post("/sessions/nobody/undo").status_code == 404
    assert http.post("/sessions/nobody/fork", json={"to": "x"}).status_code == 404
    assert http.post("/sessions/nobody/fork", json={}).status_code == 400
    assert http.delete("/sessions/nobody").status_code == 404


def test_requests_of_one_session_at_the_same_time_are_all_answered(http, gateway):
    def ask(number):
        body = {"messages": [{"role": "user", "content": f"Say {number}."}], "max_tokens": 4, "session_id": "many"}
        return http.post(CHAT, json=body).status_code

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(ask, range(24))) == {200}
    assert "many" in names(http)
    assert not [each.name for each in files(gateway).iterdir() if each.name.endswith(".new")]


def test_each_of_two_requests_of_a_session_keeps_its_whole_name(http, gateway):
    name = "long " * 100
    body = {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 2, "session_id": name}
    with http.stream("POST", CHAT, json={**body, "max_tokens": 60, "ignore_eos": True, "stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        with gateway.client() as other:
            assert other.post(CHAT, json=body).status_code == 200
        assert list(lines)
    until(lambda: http.get(f"/sessions/{quote(name)}").json()["tokens"] > 60)
    assert names(http) == {name}
    assert http.post("/sessions/nobody/fork", json={"to": name + "too"}).status_code == 404
    assert http.post(f"/sessions/{quote(name)}/fork", json={"to": name + "too"}).status_code == 200
    assert names(http) == {name, name + "too"}


def test_a_session_is_not_saved_over_a_turn_that_begins_just_then(gateway_daemon, monkeypatch):
    """The turn makes the file between the check of the name's owner and the saving."""
    kv_open = sym.aio.kv_open

    async def race():
        tenant = await make_tenant(Place(sym.model_info().mount, "raced"), "raced", 1000, None, int)
        path = tenant.session("raced").path
        turn = []

        async def opened(name, flags):
            try:
                return await kv_open(name, flags)
            except sym.NotFound:
                if not turn:
                    turn.append(await sym.aio.kv_create(path))
                    await sym.aio.kv_lock(turn[0])
                    await sym.aio.kv_write(turn[0], [1, 2, 3])
                raise

        monkeypatch.setattr(sym.aio, "kv_open", opened)
        async with await sym.aio.kv_create() as kv:
            await sym.aio.kv_write(kv, [4, 5])
            await _save(tenant, tenant.session("raced"), kv, None, [])
        assert (await sym.aio.kv_read(path))[0] == [1, 2, 3]
        await sym.aio.kv_remove(turn[0])
        assert not await sym.aio.kv_list(tenant.sessions)

    monkeypatch.setenv("SYMPHONY_SOCKET", str(gateway_daemon.socket))
    with sym.connection().use():
        anyio.run(race)


def test_a_conversation_that_could_not_begin_leaves_no_file(http):
    body = {"messages": [{"role": "user", "content": "a " * 9000}], "conversation": "too-long"}
    assert http.post(CHAT, json=body).status_code == 400
    assert "too-long" not in names(http)


def test_a_name_that_is_no_text_is_listed_all_the_same(http, gateway):
    say(http, "Hi.", "plain")
    other = os.fsencode(files(gateway)) + b"/\xff.kv"
    shutil.copyfile(files(gateway) / "plain.kv", other)
    assert names(http) == {"plain", "?"}
    Path(os.fsdecode(other)).unlink()


def test_what_nobody_was_shown_of_a_stop_text_is_in_no_answer_no_file_and_no_log_probability(http, gateway):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "ab Observation: c"}}}
    body = {"messages": [{"role": "user", "content": "Hi."}], "stop": ["Observation:"], "response_format": form}
    for more in ({"conversation": "stopped"}, {"session_id": "stopped-too"}, {}, {"n": 2}):
        answer = http.post(CHAT, json={**body, **more, "logprobs": True}).json()
        for choice in answer["choices"]:
            assert choice["message"]["content"] == '"ab '
            told = choice["logprobs"]["content"]
            assert "".join(each["token"] for each in told) == '"ab', "the next token is ` Observation`"
            assert answer["usage"]["completion_tokens"] == (len(told) + 2) * len(answer["choices"])
    for name, said in (("stopped", '"ab'), ("stopped-too", '"ab')):
        assert http.get(f"/sessions/{name}").json()["messages"][-1]["content"].strip() == said
    with http.stream("POST", CHAT, json={**body, "stream": True, "logprobs": True}) as streamed:
        events = [json.loads(line[6:]) for line in streamed.iter_lines() if line.startswith("data: {")]
    choices = [each["choices"][0] for each in events if each["choices"]]
    assert "".join(each["delta"].get("content") or "" for each in choices) == '"ab '
    told = [entry["token"] for each in choices for entry in (each.get("logprobs") or {}).get("content", ())]
    assert "".join(told) == '"ab'


def test_a_new_conversation_whose_file_is_moved_leaves_the_name_to_who_takes_it(http, gateway):
    say(http, "Hi.", "other")
    place, away = files(gateway) / "moving.kv", files(gateway) / "away.kv"
    body = {"messages": [{"role": "user", "content": "Count."}], "conversation": "moving", "max_tokens": 2000}

    def ask():
        with gateway.client() as client, contextlib.suppress(httpx.TimeoutException):
            client.post(CHAT, json={**body, "ignore_eos": True}, timeout=0.5)  # it is never sent

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        until(lambda: place.rename(away) or True)
        shutil.copyfile(files(gateway) / "other.kv", place)
        asked.result()
    said = (files(gateway) / "other.kv").read_bytes()
    until(lambda: subprocess.run(["flock", "-n", away, "true"], check=False).returncode == 0)
    assert place.read_bytes() == said, "what has the name now is another's"
    assert names(http) == {"other", "moving", "away"}
    assert http.get("/sessions/away").json()["tokens"] == 0


@pytest.mark.parametrize(("interface", "last"), [(CHAT, "[DONE]"), ("/v1/messages", "message_stop")])
def test_the_last_event_of_a_stream_comes_when_the_file_has_all_of_the_turn(http, gateway, interface, last):
    """Whatever befalls the gateway then, nothing is lost; and the next turn may begin."""
    body = {"messages": [{"role": "user", "content": "Count."}], "conversation": "told", "stream": True}
    for _ in range(5):
        with http.stream("POST", interface, json={**body, "max_tokens": 5}) as answer:
            lines = []
            assert any(lines.append(line) or last in line for line in answer.iter_lines()), (answer.status_code, lines)
            with (files(gateway) / "told.kv").open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                fcntl.flock(file, fcntl.LOCK_UN)  # the kernel tells of a close only later


def test_a_conversation_that_is_moved_during_a_turn_and_one_that_has_its_name_then_are_two(http, gateway):
    say(http, "First.", "one")
    before = http.get("/sessions/one").json()
    body = {"messages": [{"role": "user", "content": "Count."}], "conversation": "one", "stream": True}
    with http.stream("POST", CHAT, json={**body, "max_tokens": 120, "ignore_eos": True}) as answer:
        lines = answer.iter_lines()
        for _ in range(10):
            next(lines)
        (files(gateway) / "one.kv").rename(files(gateway) / "away.kv")
        with gateway.client() as other:
            say(other, "A question that is longer than the whole turn before it was, by some words.", "one")
            assert other.get("/sessions/one").json()["messages"][0]["content"].startswith("A question that is longer")
            assert other.get("/sessions/away").json()["messages"] == before["messages"]
        assert list(lines)[-2] == "data: [DONE]", "no error follows"
    until(lambda: http.get("/sessions/away").json()["tokens"] > before["tokens"] + 100)
    assert len(http.get("/sessions/one").json()["messages"]) == 2


def test_a_conversation_has_one_turn_at_a_time(http, gateway):
    body = {"messages": [{"role": "user", "content": "Count."}], "conversation": "busy", "stream": True}
    with http.stream("POST", CHAT, json={**body, "max_tokens": 3000, "ignore_eos": True}) as answer:
        lines = answer.iter_lines()  # closing it closes the connection
        next(lines)
        with gateway.client() as other:
            refused = other.post(CHAT, json={**body, "stream": False, "max_tokens": 2})
            assert refused.status_code == 409
            message = refused.json()["error"]["message"]
            assert re.search(r"busy is being answered: .*busy.kv is locked by pid \d+ \(", message), message
