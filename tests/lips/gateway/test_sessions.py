"""Conversations as files: by name, listed, forked in a shell, undone, exported; and what their turns cost."""

import fcntl
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import quote

import anyio
import httpx
import pytest

import libsym as sym
from lips.gateway.engine import _save
from lips.gateway.places import Place
from lips.gateway.tenants import make_tenant
from tests.lips.gateway.test_odd_clients import connected, request_of
from tests.lips.gateway.wire import CHAT, ENDLESS, MESSAGES, cached, events_of, post, streaming, until, user


def say(http, text, conversation, **options):
    body = {"messages": user(text), "conversation": conversation, "max_tokens": 10, "temperature": 0}
    return post(http, CHAT, body, **options)


def said_in(http, name):
    return [each["content"] for each in http.get(f"/sessions/{quote(name, safe='')}").json()["messages"]]


def names(http):
    return {each["name"] for each in http.get("/sessions").json()["sessions"]}


@pytest.fixture(name="files", autouse=True)
def _files(gateway, http):
    """The directory of conversations, with none of other tests."""
    http.get("/sessions")  # the first request makes the directory
    directory = gateway.files / "local" / "sessions"
    for path in directory.iterdir():
        path.unlink()
    return directory


@pytest.fixture
def other(gateway):
    with gateway.client() as client:
        yield client


@pytest.mark.slow
def test_a_conversation_is_a_file_that_a_shell_lists_forks_and_a_client_talks_to(http, files):
    first = say(http, "My name is Ann.", "ann")["usage"]
    assert cached(first) == 0
    subprocess.run(["cp", files / "ann.kv", files / "copy.kv"], check=True)
    original, copy = say(http, "And what is yours?", "ann"), say(http, "And what is yours?", "copy")
    assert copy["choices"] == original["choices"], "both know the same"
    assert cached(copy["usage"]) == first["total_tokens"], "not a token was computed again"
    assert names(http) == {"ann", "copy"}
    (files / "copy.kv").unlink()
    assert names(http) == {"ann"}


@pytest.mark.slow
def test_a_turn_and_a_whole_history_cost_what_is_new_in_them(http):
    def computed(usage):
        return usage["prompt_tokens"] - cached(usage)

    told = [say(http, "Tell me more.", "long")["usage"] for _ in range(6)]
    assert len({computed(each) for each in told[1:]}) == 1, "each turn after the first costs the same"
    assert computed(told[-1]) < 20 < told[-1]["prompt_tokens"]
    messages, costs = [], []
    for _ in range(4):
        messages += user("Tell me more of that, please.")
        answer = post(http, CHAT, messages=messages, max_tokens=12, temperature=0)
        costs.append(computed(answer["usage"]))
        messages.append(answer["choices"][0]["message"])
    assert max(costs[1:]) <= 24, costs


@pytest.mark.slow
@pytest.mark.parametrize(("headers", "more"), [({"x-session-id": "mine"}, {"n": 3}), ({}, {"session_id": "mine"})])
def test_a_name_that_a_client_gives_its_session_is_its_files_and_has_the_first_choice(http, files, headers, more):
    body = {"messages": user("Say a word."), "max_tokens": 6, "seed": 1, **more}
    answer = http.post(CHAT, json=body, headers=headers).json()
    assert (files / "mine.kv").exists()
    said = said_in(http, "mine")
    assert said[-2] == "Say a word."
    assert answer["choices"][0]["message"]["content"].startswith(said[-1])


@pytest.mark.slow
def test_a_conversation_of_any_name_is_a_file_of_its_own(http, files):
    left = {"a b", "a/b", "a?b", "a%2fb", "50%", ".hidden", "é" * 60, "long " * 100, "a/export", "q~0123456789abcdef"}
    for name in sorted(left):
        say(http, f"I am {name}.", name, max_tokens=2)
    assert (names(http), len(list(files.iterdir()))) == (left, len(left))
    for name in sorted(left):
        assert said_in(http, name)[-2] == f"I am {name}."
        quoted = quote(name, safe="")
        assert http.post(f"/sessions/{quoted}/undo").json()["removed"] > 0
        assert http.delete(f"/sessions/{quoted}").json() == {"name": name, "deleted": True}
        left = left - {name}
        assert names(http) == left


@pytest.mark.slow
def test_files_of_before_keep_their_names_and_one_that_is_no_text_is_listed(http, files):
    say(http, "First.", "plain", max_tokens=4)
    (files / "plain.kv").rename(files / "50%.kv")
    assert names(http) == {"50%"}
    assert cached(say(http, "Second.", "50%", max_tokens=4)["usage"]) > 0
    assert [each.name for each in files.iterdir()] == ["50%.kv"]
    other = os.fsencode(files) + b"/\xff.kv"
    shutil.copyfile(files / "50%.kv", other)
    assert names(http) == {"50%", "?"}
    Path(os.fsdecode(other)).unlink()


@pytest.mark.slow
def test_a_key_of_the_prompt_cache_and_a_completion_leave_a_conversation_of_that_name_alone(http):
    say(http, "First.", "ann")
    before = http.get("/sessions/ann").json()
    post(http, CHAT, messages=user("Hello there."), max_tokens=6, prompt_cache_key="ann")
    refused = post(http, "/v1/completions", prompt="Once", max_tokens=4, conversation="ann", status=400)
    assert "conversation" in refused["error"]["message"]
    assert http.get("/sessions/ann").json() == before
    assert names(http) == {"ann"}


@pytest.mark.slow
def test_a_system_message_in_a_later_turn_is_the_same_or_a_turn(http):
    for number, told in enumerate(("You are FOO.", "You are FOO.", "You are BAR.")):
        messages = [{"role": "system", "content": told}, *user(f"Turn {number}?")]
        post(http, CHAT, messages=messages, conversation="told", max_tokens=4, temperature=0)
    text = "\n".join(said_in(http, "told"))
    assert text.startswith("You are FOO.")
    assert (text.count("You are FOO."), text.count("You are BAR.")) == (1, 1)


@pytest.mark.slow
def test_a_repetition_penalty_counts_the_whole_prompt_whatever_is_known_of_it(http):
    body = {"messages": user("Tell me about the sea, the sand and the sea again."), "max_tokens": 24}
    first, second = (post(http, CHAT, body, temperature=0, repetition_penalty=1.6) for _ in range(2))
    assert cached(second["usage"]) > 0
    assert second["choices"][0]["message"] == first["choices"][0]["message"]


def test_a_turn_shows_and_lends_its_conversation_as_it_was_and_excludes_all_others(
    http, files, other, gateway_daemon, start_gateway
):
    """The others are a client of this gateway, another gateway, and a program."""
    say(http, "First.", "busy")
    before, turn = http.get("/sessions/busy").json(), {**ENDLESS, "conversation": "busy"}
    with start_gateway().client() as stranger, streaming(http, turn, 20):
        for client in (other, stranger):
            assert client.get("/sessions/busy").json() == before
            assert client.post("/sessions/busy/fork", json={"to": "fork"}).status_code == 200
            for number in range(3):
                (files / f"{number}.kv").write_bytes(client.get("/sessions/busy/export").content)
            for name in "fork", "0", "1", "2":
                assert client.get(f"/sessions/{name}").json()["messages"] == before["messages"]
                (files / f"{name}.kv").unlink()
            refused = post(client, CHAT, turn, max_tokens=2, status=409)["error"]["message"]
            assert re.search(r"busy is being answered: .*busy.kv is locked by pid \d+ \(", refused), refused
            assert client.delete("/sessions/busy").status_code == 409
            assert client.post("/sessions/busy/undo").status_code == 409
        post(stranger, CHAT, messages=turn["messages"], session_id="busy", max_tokens=2)
    assert "First." in said_in(http, "busy")
    assert "busy" in names(http)
    connection = sym.connection(str(gateway_daemon.socket))
    with connection.use(), sym.kv_open(f"{files}/busy.kv", "rw") as kv:
        until(lambda: sym.kv_lock(kv, blocking=False))
        post(http, CHAT, turn, max_tokens=2, status=409)


@pytest.mark.slow
def test_a_turn_whose_client_goes_leaves_what_it_was_sent(http):
    say(http, "First.", "left")
    before = http.get("/sessions/left").json()
    body: dict[str, Any] = {**ENDLESS, "conversation": "left", "temperature": 0}
    with pytest.raises(httpx.ReadTimeout):
        http.post(CHAT, json=body, timeout=0.5)
    until(lambda: say(http, "Again.", "left", max_tokens=2))
    assert body["messages"][0]["content"] not in said_in(http, "left")
    http.post("/sessions/left/undo")
    assert http.get("/sessions/left").json() == before
    sent = ""
    with streaming(http, body, 0) as lines:
        while len(sent) < 20:
            for event in events_of(next(lines)):
                sent += event["choices"][0]["delta"].get("content") or ""
    until(lambda: len(said_in(http, "left")) > len(before["messages"]))
    assert said_in(http, "left")[-1].startswith(sent[:20])


@pytest.mark.slow
def test_the_page_s_routes_fork_undo_export_and_remove(http, files):
    say(http, "First.", "a", max_tokens=4)
    before = http.get("/sessions/a").json()
    assert [each["role"] for each in before["messages"]] == ["user", "assistant"]
    say(http, "Second.", "a", max_tokens=4)
    assert post(http, "/sessions/a/fork", to="b") == {"name": "b"}
    assert http.post("/sessions/a/undo").json()["tokens"] == before["tokens"]
    assert http.get("/sessions/a").json()["messages"] == before["messages"]
    assert said_in(http, "b")[2] == "Second."
    image = http.get("/sessions/b/export")
    assert image.content == (files / "b.kv").read_bytes()
    assert 'filename="b.kv"' in image.headers["content-disposition"]
    (files / "c.kv").write_bytes(image.content)
    assert said_in(http, "c") == said_in(http, "b")
    assert http.delete("/sessions/b").json()["deleted"]
    assert names(http) == {"a", "c"}
    live = http.get("/live").json()
    assert live["kv_used_bytes"] > 0
    assert live["running"] == 0


@pytest.mark.parametrize("name", ["%2e%2e", "%2e%2e%2fx", ".hidden", "x" * 300, "é" * 101, "a%00b"])
def test_names_that_are_none_of_a_file_lead_nowhere(http, name):
    for path in (f"/sessions/{name}", f"/sessions/{name}/export"):
        assert http.get(path).status_code in {400, 404}


def test_what_is_not_there_is_said_so_and_what_could_not_begin_is_not_there(http):
    assert http.get("/sessions/nobody").status_code == 404
    assert http.post("/sessions/nobody/undo").status_code == 404
    post(http, "/sessions/nobody/fork", to="x", status=404)
    post(http, "/sessions/nobody/fork", status=400)
    assert http.delete("/sessions/nobody").status_code == 404
    say_too_much = {"messages": user("a " * 9000), "conversation": "too-long"}
    post(http, CHAT, say_too_much, status=400)
    assert names(http) == set()


@pytest.mark.slow
def test_each_of_two_requests_of_a_session_keeps_its_whole_name(http, other):
    name = "long " * 100
    body = {"messages": user("Hi."), "max_tokens": 2, "session_id": name}
    with streaming(http, {**body, "max_tokens": 60, "ignore_eos": True}) as lines:
        post(other, CHAT, body)
        assert list(lines)
    until(lambda: http.get(f"/sessions/{quote(name)}").json()["tokens"] > 60)
    assert names(http) == {name}
    post(http, "/sessions/nobody/fork", to=name + "too", status=404)
    post(http, f"/sessions/{quote(name)}/fork", to=name + "too")
    assert names(http) == {name, name + "too"}


def test_a_session_is_not_saved_over_a_turn_that_begins_just_then(gateway_daemon, monkeypatch):
    """The turn makes the file between the check of the name's owner and the saving."""
    kv_open = sym.aio.kv_open

    async def race():
        tenant = await make_tenant(Place(sym.model_info().mount, "raced"), "raced", 1000, None, int)
        path = tenant.session("raced").path
        turn = list[Any]()

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


@pytest.mark.slow
def test_what_nobody_was_shown_of_a_stop_text_is_in_no_answer_no_file_and_no_log_probability(http):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "ab Observation: c"}}}
    body = {"messages": user("Hi."), "stop": ["Observation:"], "response_format": form, "logprobs": True}
    for more in ({"conversation": "stopped"}, {"session_id": "stopped-too"}, {}, {"n": 2}):
        answer = post(http, CHAT, body, **more)
        for choice in answer["choices"]:
            assert choice["message"]["content"] == '"ab '
            told = [each["token"] for each in choice["logprobs"]["content"]]
            assert "".join(told) == '"ab', "the next token is ` Observation`"
            assert answer["usage"]["completion_tokens"] == (len(told) + 2) * len(answer["choices"])
    for name in ("stopped", "stopped-too"):
        assert said_in(http, name)[-1].strip() == '"ab'
    events = events_of(http.post(CHAT, json={**body, "stream": True}).text)
    choices = [each["choices"][0] for each in events if each["choices"]]
    assert "".join(each["delta"].get("content") or "" for each in choices) == '"ab '
    told = [entry["token"] for each in choices for entry in (each.get("logprobs") or {}).get("content", ())]
    assert "".join(told) == '"ab'


@pytest.mark.slow
def test_a_new_conversation_whose_file_is_moved_leaves_the_name_to_who_takes_it(http, files, gateway):
    say(http, "Hi.", "other")
    place, away = files / "moving.kv", files / "away.kv"
    with connected(gateway, request_of({**ENDLESS, "conversation": "moving"})):
        until(lambda: place.rename(away))
        shutil.copyfile(files / "other.kv", place)
    said = (files / "other.kv").read_bytes()
    until(lambda: subprocess.run(["flock", "-n", away, "true"], check=False).returncode == 0)
    assert place.read_bytes() == said, "what has the name now is another's"
    assert names(http) == {"other", "moving", "away"}
    assert http.get("/sessions/away").json()["tokens"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("interface", "last"), [(CHAT, "[DONE]"), (MESSAGES, "message_stop")])
def test_the_last_event_of_a_stream_comes_when_the_file_has_all_of_the_turn(http, files, interface, last):
    """Whatever befalls the gateway then, nothing is lost; and the next turn may begin."""
    for _ in range(2):
        body = {"messages": user("Count."), "conversation": "told", "max_tokens": 5}
        with streaming(http, body, 0, interface) as lines:
            assert any(last in line for line in lines)
            with (files / "told.kv").open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                fcntl.flock(file, fcntl.LOCK_UN)  # the kernel tells of a close only later


@pytest.mark.slow
def test_a_conversation_that_is_moved_during_a_turn_and_one_that_has_its_name_then_are_two(http, files, other):
    say(http, "First.", "one")
    before = http.get("/sessions/one").json()
    with streaming(http, {**ENDLESS, "conversation": "one", "max_tokens": 60}, 10) as lines:
        (files / "one.kv").rename(files / "away.kv")
        say(other, "A question that is longer than the whole turn before it was, by some words.", "one")
        assert said_in(other, "one")[0].startswith("A question that is longer")
        assert other.get("/sessions/away").json()["messages"] == before["messages"]
        assert list(lines)[-2] == "data: [DONE]", "no error follows"
    until(lambda: http.get("/sessions/away").json()["tokens"] > before["tokens"] + 50)
    assert len(said_in(http, "one")) == 2
