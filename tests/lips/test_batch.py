"""A file of prompts is answered line by line, even if the program ends in between."""

from __future__ import annotations

import fcntl
import json
import os
import signal

import pytest

import libsym as sym

pytestmark = pytest.mark.slow


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_prompt_has_the_answer_that_generate_gives(lips, tmp_path):
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    messages = [{"role": "user", "content": "Who are you?"}]
    asked = [
        {"prompt": "Once upon a"},
        {"messages": messages, "id": "who", "max_tokens": 3},
        {"prompt": "The sea", "temperature": 0.9, "seed": 5},
    ]
    prompts.write_text("\n\n".join(map(json.dumps, asked)) + "\n")
    assert lips.run("batch", str(prompts), str(answers), "--max-tokens", "6") == ""
    sampler = sym.Sampler(temperature=0.9, seed=5)
    expected = {
        1: sym.generate(sym.kv_create(), sym.tokenize("Once upon a"), max_tokens=6),
        "who": sym.generate(sym.kv_create(), sym.chat_tokens(messages), max_tokens=3),
        5: sym.generate(sym.kv_create(), sym.tokenize("The sea"), sampler=sampler, max_tokens=6),
    }
    given = {each["id"]: (each["text"], each["finish"]) for each in lines(answers)}
    assert given == {name: (answer.full_text(), answer.finish) for name, answer in expected.items()}


def test_a_killed_run_goes_on_where_it_was(lips, tmp_path):
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
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


@pytest.mark.parametrize("answers", ["prompts.jsonl", "notes.txt"])
def test_a_file_that_is_none_of_answers_stays_as_it_is(lips, tmp_path, answers):
    prompt = '{"prompt": "Once"}'
    (tmp_path / "notes.txt").write_text("bread, milk")
    (tmp_path / "prompts.jsonl").write_text(prompt)
    done = lips.finish("batch", str(tmp_path / "prompts.jsonl"), str(tmp_path / answers), "--max-tokens", "1")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert (tmp_path / answers).read_text() == ("bread, milk" if answers == "notes.txt" else prompt)


def test_an_id_comes_back_as_it_was_given_and_a_line_of_any_depth_is_named(lips, tmp_path):
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text('{"prompt": "Once", "id": "\\ud800"}\n')
    lips.run("batch", str(prompts), str(answers), "--max-tokens", "1")
    assert lines(answers)[0]["id"] == "\ud800"
    prompts.write_text("[" * 100_000)
    done = lips.finish("batch", str(prompts), str(answers))
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "line 1: no JSON" in done.stderr


def test_what_has_no_answer_says_why_and_what_is_no_prompt_ends_the_run(lips, tmp_path):
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text('{"prompt": ""}\n{"prompt": 5}\n{"prompt": "A", "max_tokens": 2}\n')
    done = lips.finish("batch", str(prompts), str(answers))
    assert (done.returncode, done.stderr) == (1, f"batch: answers that are errors, of this run: 2 (see {answers})\n")
    assert {each["id"]: [*each] for each in lines(answers)} == {
        1: ["id", "error"],
        2: ["id", "error"],
        3: ["id", "text", "finish"],
    }
    wrong = {"[1]": "1: give an object", "{": "1: no JSON", '{"prompt": "A", "top": 1}': "1: give either prompt or"}
    twice = {'{"prompt": "A", "id": 2}\n{"prompt": "B"}': f"2: its id 2 is that of {prompts}, line 1"}
    for line, about in {**wrong, **twice}.items():
        prompts.write_text(line)
        done = lips.finish("batch", str(prompts), str(answers))
        assert done.returncode == 1
        assert done.stderr.startswith(f"batch: {prompts}, line {about}")
        assert done.stderr.count("\n") == 1
    missing = lips.finish("batch", str(tmp_path / "none"), str(answers))
    assert (missing.returncode, missing.stderr.count("\n")) == (2, 1), "an argument of no use, as of other programs"
    with answers.open("a+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        done = lips.finish("batch", str(prompts), str(answers))
    assert (done.returncode, done.stderr) == (1, f"batch: {answers}: another run appends to it\n")
