"""A file of prompts is answered line by line, even if the program ends in between."""

import fcntl
import json
import os
import signal

import pytest

import libsym as sym

pytestmark = pytest.mark.slow


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def prompts(tmp_path):
    return tmp_path / "prompts.jsonl"


@pytest.fixture
def answers(tmp_path):
    return tmp_path / "answers.jsonl"


def test_each_prompt_has_the_answer_that_generate_gives(tiny, prompts, answers):
    messages, sampler = [{"role": "user", "content": "Who are you?"}], sym.Sampler(temperature=0.9, seed=5)
    asked = [
        {"prompt": "Once upon a"},
        {"messages": messages, "id": "who", "max_tokens": 3},
        {"prompt": "The sea", "temperature": 0.9, "seed": 5},
    ]
    prompts.write_text("\n\n".join(map(json.dumps, asked)) + "\n")
    assert tiny.run("batch", str(prompts), str(answers), "--max-tokens", "6") == ""
    expected = {
        1: sym.generate(sym.kv_create(), sym.tokenize("Once upon a"), max_tokens=6),
        "who": sym.generate(sym.kv_create(), sym.chat_tokens(messages), max_tokens=3),
        5: sym.generate(sym.kv_create(), sym.tokenize("The sea"), sampler=sampler, max_tokens=6),
    }
    given = {each["id"]: (each["text"], each["finish"]) for each in lines(answers)}
    assert given == {name: (answer.full_text(), answer.finish) for name, answer in expected.items()}


def test_a_killed_run_goes_on_where_it_was(lips, prompts, answers):
    prompts.write_text("".join(json.dumps({"prompt": f"Number {n} is"}) + "\n" for n in range(24)))
    process = lips.start("batch", str(prompts), str(answers), "--max-tokens", "24", "--streams", "2")
    while process.poll() is None and (not answers.exists() or answers.read_bytes().count(b"\n") < 4):
        os.sched_yield()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = answers.read_text()
    assert 4 <= before.count("\n") < 24
    with answers.open("a") as file:
        file.write('{"id": 23, "te')  # as if the kill had come in the middle of a line
    lips.run("batch", str(prompts), str(answers), "--max-tokens", "4")
    assert answers.read_text().startswith(before)
    assert sorted(each["id"] for each in lines(answers)) == [*range(1, 25)]
    assert lips.run("batch", str(prompts), str(answers)) == ""
    assert len(lines(answers)) == 24, "nothing is asked again"


def test_a_file_that_is_none_of_answers_stays_as_it_is(tiny, tmp_path, prompts):
    prompts.write_text('{"prompt": "Once"}')
    (tmp_path / "notes.txt").write_text("bread, milk")
    for path in (prompts, tmp_path / "notes.txt"):
        text = path.read_text()
        tiny.refused("batch", str(prompts), str(path), "--max-tokens", "1")
        assert path.read_text() == text


def test_an_id_comes_back_as_it_was_given_and_what_has_no_answer_says_why(tiny, prompts, answers):
    prompts.write_text('{"prompt": "Once", "id": "\\ud800"}\n{"prompt": ""}\n{"prompt": 5}\n')
    told = tiny.refused("batch", str(prompts), str(answers), "--max-tokens", "1")
    assert told == f"batch: answers that are errors, of this run: 2 (see {answers})\n"
    keys = {each["id"]: [*each] for each in lines(answers)}
    assert keys == {"\ud800": ["id", "text", "finish"], 2: ["id", "error"], 3: ["id", "error"]}


def test_what_is_no_prompt_ends_the_run(tiny, tmp_path, prompts, answers):
    for line, about in {
        "[1]": "1: give an object",
        "{": "1: no JSON",
        "[" * 100_000: "1: no JSON",
        '{"prompt": "A", "top": 1}': "1: give either prompt or",
        '{"prompt": "A", "id": 2}\n{"prompt": "B"}': f"2: its id 2 is that of {prompts}, line 1",
    }.items():
        prompts.write_text(line)
        assert tiny.refused("batch", str(prompts), str(answers)).startswith(f"batch: {prompts}, line {about}")
    tiny.refused("batch", str(tmp_path / "none"), str(answers), status=2)
    prompts.write_text('{"prompt": "A"}')
    with answers.open("a+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        told = tiny.refused("batch", str(prompts), str(answers))
    assert told == f"batch: {answers}: another run appends to it\n"
