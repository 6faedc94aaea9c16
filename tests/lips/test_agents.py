"""Agents: tools run beside the model, and nothing that was computed is computed again.

The model of these tests has 135 million parameters and can't be expected to choose tools well. Where a test is about
what becomes of a choice, the choice is scripted: forced through a grammar, computed and appended as any other.
"""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import anyio
import anyio.lowlevel
import pytest

import libsym as sym
from lips import async_tools, codeact, react, rlm, swarm
from tests.lips.scripted import saying, scripted
from tests.symphony.daemons import SYMPHONY

pytestmark = pytest.mark.slow
SERVER = Path(__file__).with_name("weather_server.py")


def test_tools_do_what_they_say(tmp_path):
    assert react.calculate("17 * (2 + 3) - -1") == "86"
    assert react.calculate("1 / 3") == "0.333333333333"
    for no_arithmetic in ("__import__('os')", "2 ** 9", "x + 1", "'a' * 9", "1 +"):
        with pytest.raises((ValueError, SyntaxError)):
            react.calculate(no_arithmetic)
    (tmp_path / "a.txt").write_text("The red car is fast.\nThe blue car is slow.\n")
    assert react.search(tmp_path)("car RED") == "a.txt: The red car is fast."
    assert react.search(tmp_path)("green") == "nothing found"
    people = tmp_path / "people.db"
    with sqlite3.connect(people) as connection:
        connection.execute("CREATE TABLE people (name TEXT, age INTEGER)")
        connection.execute("INSERT INTO people VALUES ('Ada', 36)")
    assert react.query(people)("SELECT name FROM people WHERE age > 30") == "[('Ada',)]"
    for words, why in (("DELETE FROM people", "readonly"), (f"ATTACH '{people}' AS other", "too many attached")):
        with pytest.raises(sqlite3.OperationalError, match=why):
            react.query(people)(words)


def test_react_computes_the_prompt_what_is_said_and_what_the_tools_give_and_nothing_twice(tiny, computed):
    calls = ("17 * 23", "1 / 0")
    said = [*(f"Thought: I try.\nAction: calculate[{call}]" for call in calls), "Answer: 391"]
    tools = {"calculate": react.calculate}
    with sym.Chat(sym.kv_create(), react.prompt(tools)) as chat, scripted(said):
        lines, num_tokens = computed(lambda: list(react.react(chat, "What is 17 * 23?", tools, max_calls=4)))
        text, in_file = sym.detokenize([*chat.kv.read()[0], *chat.pending]), chat.kv.len()
    assert lines == [said[0], "Observation: 391", said[1], "Observation: ZeroDivisionError: division by zero", said[2]]
    places = [text.index(line) for line in lines]
    assert places == sorted(places)
    # The last token of a forced answer is pending: computed and cut, if the grammar was late. All else is there once.
    assert in_file <= num_tokens <= in_file + len(said)


def test_react_may_only_answer_when_its_calls_are_used_up_or_made_again(tiny, monkeypatch):
    forms, ask = [], sym.Chat.ask

    def noted(chat, content, *, grammar, **how):
        forms.append((content, "Action" in grammar.source))
        return ask(chat, content, grammar=saying(next(said)), **how)

    monkeypatch.setattr(sym.Chat, "ask", noted)
    call, tools = "Thought: More.\nAction: calculate[1 + 1]", {"calculate": react.calculate}
    for max_calls, expected in [
        (1, [("Sum?", True), ("Observation: 2", False)]),
        (9, [("Sum?", True), ("Observation: 2", True), ("Observation: you have made this call before", False)]),
        (0, [("Sum?", False)]),
    ]:
        said = iter([call] * (len(expected) - 1) + ["Thought: Done.\nAnswer: 2"])
        forms.clear()
        with sym.Chat(sym.kv_create()) as chat:
            *_, last = react.react(chat, "Sum?", tools, max_calls)
        assert (last, forms) == ("Thought: Done.\nAnswer: 2", expected)


def test_react_without_room_for_an_answer_ends_in_one_line(tiny):
    prompt = react.prompt({"calculate": react.calculate})
    asked = [{"role": "system", "content": prompt}, {"role": "user", "content": ""}]
    room = sym.model_info().max_positions - len(sym.chat_tokens(asked))
    full = tiny.refused("react", "x" * (room - 20), "--max-calls", "0")
    assert full == "react: the model's context is full, and there is no answer\n"


def test_react_by_itself_keeps_to_the_form(lips, tmp_path):
    (tmp_path / "a.txt").write_text("The treasure is in Lima.\n")
    out = lips.run("react", "Where is the treasure?", "--files", str(tmp_path), "--max-calls", "1")
    form = r"Thought: [^\n]+\n(Action: (calculate|search)\[[^\n]+\]\nObservation: .+\n|Answer: [^\n]+\n)"
    assert re.fullmatch(f"({form})+", out)
    assert out.splitlines()[-1].startswith("Answer: ")


def test_codeact_runs_what_the_model_writes_and_keeps_its_variables(tiny, computed):
    said = [
        "primes = [n for n in range(2, 20) if all(n % d for d in range(2, n))]\nprint(primes)",
        "answer(len(primes))",
    ]
    with sym.Chat(sym.kv_create(), codeact.SYSTEM) as chat, scripted(said):
        turns, num_tokens = computed(lambda: list(codeact.act(chat, "How many primes are below 20?")))
        assert turns == [said[0], "[2, 3, 5, 7, 11, 13, 17, 19]\n", said[1], "", "answer: 8"]
        assert 0 <= num_tokens - chat.kv.len() <= len(said), "no turn is prefilled again"


def test_codeact_has_tools_and_lets_the_code_do_nothing_else(tiny, tmp_path):
    (tmp_path / "log.txt").write_text("one\nerror two\n")
    said = [
        f"print([line for line in open('{tmp_path}/log.txt') if 'error' in line], double(4))",
        "import socket\nsocket.socket()",
        "open('/etc/passwd')",
        "while True: pass",
    ]
    with sym.Chat(sym.kv_create()) as chat, scripted(said):
        turns = list[str]()
        with pytest.raises(sym.Invalid, match="no answer came in 4 turns"):
            turns.extend(codeact.act(chat, "?", [tmp_path / "log.txt"], seconds=1, double=lambda n: 2 * n))
    assert turns[1] == "['error two\\n'] 8\n"
    assert turns[3].endswith("PermissionError: [Errno 1] Operation not permitted\n")
    assert turns[5].endswith("PermissionError: [Errno 13] Permission denied: '/etc/passwd'\n")
    assert turns[7].startswith("the code was ended after 1 s")
    assert len(turns) == 8


def test_a_recursive_model_explores_texts_and_asks_their_readers(tiny, computed):
    with (tiny.mount / ".symphony/text/atlas.kv").open("w") as text:
        text.write("The treasure lies in the city of Lima. " * 20)
    (tiny.mount / "other.txt").write_text("secret")
    said = [
        "text = open(paths['atlas.kv']).read()\nprint(len(text), ask('atlas.kv', 'Where?') != '')",
        f"open('{tiny.mount}/other.txt')",
        "ask('none.kv', 'Where?')",
        "answer(text[4:12])",
    ]
    length = sym.kv_stat("atlas.kv").tokens
    with scripted(said):
        turns, num_tokens = computed(lambda: list(rlm.explore("Where is the treasure?", ["atlas.kv"])))
    assert turns[1] == "780 True\n"
    assert "Permission denied" in turns[3]
    assert "there is no context none.kv" in turns[5]
    assert turns[-1] == "answer: treasure"
    own = len(sym.tokenize("".join(turns))) + 2 * length
    assert num_tokens < own, "the context of 180 tokens is not computed again"
    assert sym.kv_stat("atlas.kv").tokens == length, "readers are forks"


def test_a_recursive_model_has_as_many_turns_as_it_is_given(tiny):
    sym.kv_create("short.kv").close()
    with scripted(["print(1)", "print(2)"]):
        told = tiny.refused("rlm", "Where?", "short.kv", "--max-turns", "2")
    assert told == "rlm: no answer came in 2 turns: give more --max-turns\n"


def test_a_swarm_of_programs_drafts_and_votes(lips):
    words = ["What is a town?", "--agents", "poet", "banker", "--max-tokens", "8"]
    out = lips.daemon.symphony("run", "swarm", *words).stdout
    found = re.findall(r"^(\d) (\w+): (.+)$", out, re.MULTILINE)
    assert sorted(name for _, name, _ in found) == ["banker", "poet"]
    assert [count for count, _, _ in found] == ["1", "1"], "each votes once, and not for itself"
    ended = json.loads(lips.daemon.symphony("ps", "--all", "--json").stdout)
    assert {each["name"] for each in ended} >= {"swarm", "swarm-poet", "swarm-banker"}, "each was a program of its own"


def test_an_agent_that_dies_ends_the_swarm_in_one_line(tiny):
    """A role may be several words."""
    words = ["run", "swarm", "What is a town?", "--agents", "town poet", "banker", "--max-tokens", "3000"]
    process = subprocess.Popen([*SYMPHONY, *words], stderr=subprocess.PIPE, text=True, env=tiny.daemon.environment)
    while not (pids := [each.pid for each in sym.programs() if each.name == "swarm-town-poet" and each.pid]):
        assert process.poll() is None
    os.kill(pids[0], signal.SIGKILL)  # at once: a fast machine fills the context in a tenth of a second
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert re.fullmatch(r"swarm: town poet ended before its \w+ came: .+\n", err)


def test_an_agent_that_fails_says_why(tiny):
    question = "a" * sym.model_info().max_positions
    done = tiny.daemon.symphony("run", "swarm", question, "--agents", "poet", "banker", check=False)
    assert done.returncode == 1
    assert re.fullmatch(r"swarm: \w+ ended before its draft came: .+ beyond the model's context .+\n", done.stderr)


def test_an_agent_judges_behind_the_whole_of_its_own_draft(tiny):
    with sym.Chat(sym.kv_create()) as chat:
        chat.ask("A town?", max_tokens=6).full_text()
        before = [*chat.kv.read()[0], *chat.pending]
        (found,) = swarm.scores(chat, "A town?", {"poet": "A wall."}).values()
    asked = [{"role": "user", "content": "A town? Give the best answer."}]
    before += sym.chat_tokens(asked, after_answer=True)
    with sym.kv_create() as kv:
        assert found == pytest.approx(fmean(sym.score(kv, before + sym.tokenize("A wall."))[len(before) - 1 :]))


def test_the_model_writes_while_the_tool_runs_and_reads_what_it_gives(lips):
    """The tool ends when the model has written five pieces: without overlap neither would ever end."""
    events, num_tokens = list[str](), 0

    async def converse():
        nonlocal num_tokens
        enough = anyio.Event()

        def show(text):
            events.append(text)
            if len(events) == 6:
                enough.set()

        async def tool(word):
            with anyio.fail_after(60):
                await enough.wait()
            return f"about {word}"

        async with await sym.aio.kv_create() as kv:
            before = (await sym.aio.getrusage()).tokens
            await async_tools.write(kv, "Tell me about the sea.", tool, show, max_tokens=24)
            num_tokens = (await sym.aio.getrusage()).tokens - before
            return sym.detokenize(kv.read()[0]), kv.len()

    text, length = anyio.run(converse, backend="trio")
    at = next(index for index, event in enumerate(events) if event.startswith("\n<<result: about "))
    assert re.fullmatch(r"<<search: [a-z]{2,20}>>\n", events[0])
    assert at >= 6, "it wrote on before the result was there"
    assert at < 24, "and no longer than that"
    assert "".join(events[: at + 1]) in text, "the file holds what was shown, in that order"
    assert num_tokens <= length + 3, "an interruption computes nothing again"


def test_a_tool_that_takes_longer_than_the_text_is_waited_for(tiny):
    async def converse():
        events = list[str]()

        async def tool(word):
            while not any("sea" in event or len(events) > 3 for event in events):
                await anyio.lowlevel.checkpoint()
            return "late"

        async with await sym.aio.kv_create() as kv:
            await async_tools.write(kv, "The sea?", tool, events.append, max_tokens=4)
        return events

    assert "\n<<result: late>>\n" in anyio.run(converse)


def test_an_mcp_servers_tools_are_called_as_their_schemas_say(tiny):
    from mcp import Client, StdioServerParameters

    from lips import mcp_client

    said = [
        '{"tool":"weather","arguments":{"city":"Rome","days":3}}',
        '{"tool":"capital","arguments":{"country":"Mars"}}',
        '{"answer":"It rains."}',
    ]

    async def converse():
        async with Client(StdioServerParameters(command=sys.executable, args=[str(SERVER)])) as client:
            with scripted(said):
                return [line async for line in mcp_client.converse(client, "Does it rain in Rome?", 3)]

    lines = anyio.run(converse)
    assert lines[0] == said[0]
    assert lines[1] == "3 days of rain in Rome"
    assert "Error executing tool capital" in lines[3], "an error of a tool is what the model reads"
    assert lines[4] == said[2]


def test_the_model_by_itself_can_name_no_tool_that_there_is_not(lips):
    out = lips.run("mcp_client", "What is the capital of Italy?", "--max-calls", "1", "--", sys.executable, str(SERVER))
    calls = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert ["tool" in call for call in calls] in ([True, False], [False]), "one call at most, and then the answer"
    for call in calls:
        assert call.keys() in ({"answer"}, {"tool", "arguments"})
        if "tool" in call:
            assert call["arguments"].keys() == {"weather": {"city", "days"}, "capital": {"country"}}[call["tool"]]
