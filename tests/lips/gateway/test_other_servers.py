"""Fields that users of vLLM and llama.cpp send. The tiny model's tokens are bytes; a bias says what it likes best."""

import json
import re
from typing import Any

import pytest

from tests.lips.gateway.wire import CHAT, COMPLETIONS, MESSAGES, RESPONSES, events_of, post, user

END, PAD = 257, 258
A, B, C = b"ABC"
OBJECT = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
HI = {"messages": user("Hi"), "max_tokens": 12}
SO = [*user("Hi"), {"role": "assistant", "content": "so"}]


def complete(http, **options):
    """An answer, drawn as it is likeliest."""
    answer = http.post(COMPLETIONS, json={"prompt": "Hi", "max_tokens": 12, "temperature": 0, **options})
    assert answer.status_code == 200, answer.text
    assert "symphony-ignored" not in answer.headers
    return answer.json()


def text_of(http, **options):
    return complete(http, **options)["choices"][0]["text"]


def chat(http, messages=HI["messages"], **options):
    return post(http, CHAT, {"messages": messages, "max_tokens": 8, "temperature": 0, **options})


def said_in(http, messages=HI["messages"], **options):
    return chat(http, messages, **options)["choices"][0]["message"]["content"]


def streamed(http, route, **options):
    return events_of(http.post(route, json={"stream": True, **options}).text)


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"guided_json": OBJECT}, r'\{"a":[12]\}'),
        ({"guided_json": json.dumps(OBJECT)}, r'\{"a":[12]\}'),
        ({"json_schema": OBJECT}, r'\{"a":[12]\}'),
        ({"guided_choice": ["left\n", 'r"ight']}, 'left\n|r"ight'),
        ({"guided_regex": "[x-z]{3}"}, "[x-z]{3}"),
        ({"guided_grammar": 'root ::= "yes" | "no"'}, "yes|no"),
        ({"grammar": 'root ::= item+\nitem ::= "a" [0-9] "."\n', "stop": "."}, "a[0-9]"),
        ({"grammar": 'start: "yes" | "no"'}, "yes|no"),
        ({"guided_grammar": '\n    ?start: word\n    ?word: "yes" | "no"\n'}, "yes|no"),
        ({"structured_outputs": {"json": OBJECT, "disable_any_whitespace": True}}, r'\{"a":[12]\}'),
        ({"structured_outputs": {"regex": "[x-z]{3}"}}, "[x-z]{3}"),
        ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
        ({"structured_outputs": {"grammar": 'root ::= "yes"'}}, "yes"),
        ({"structured_outputs": {"json_object": True}, "logit_bias": {ord("}"): 99}}, r"\{\}"),
    ],
    ids=str,
)
def test_an_answer_is_what_its_grammar_says(tiny, options, pattern):
    answer = post(tiny, COMPLETIONS, prompt="Hi", max_tokens=12, seed=1, **options)
    assert re.fullmatch(pattern, answer["choices"][0]["text"])


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
def test_every_interface_takes_a_grammar(tiny, route):
    body = {COMPLETIONS: {**HI, "prompt": "Hi"}, RESPONSES: {**HI, "input": "Hi", "store": False}}.get(route, HI)
    assert '"xyz"' in json.dumps(post(tiny, route, body, guided_choice=["xyz"]))


def test_an_answer_has_so_many_tokens_at_least(tiny):
    ends = {"logit_bias": {END: 99}}
    assert text_of(tiny, **ends) == ""
    assert complete(tiny, **ends, min_tokens=5)["usage"]["completion_tokens"] == 5
    assert complete(tiny, **ends, min_tokens=5, max_tokens=5)["usage"]["completion_tokens"] == 5
    assert complete(tiny, **ends, min_tokens=20, max_tokens=None, n_predict=-1)["usage"]["completion_tokens"] == 20
    assert complete(tiny, n_predict=3, max_tokens=None)["usage"]["completion_tokens"] == 3


def test_tokens_stop_an_answer(tiny):
    wants_b = {"logit_bias": {B: 99}}
    assert text_of(tiny, **wants_b) == "B" * 12
    stopped = complete(tiny, **wants_b, stop_token_ids=[B, C])["choices"][0]
    assert (stopped["text"], stopped["finish_reason"]) == ("", "stop")
    assert complete(tiny, **wants_b, stop_token_ids=[B], min_tokens=3)["usage"]["completion_tokens"] >= 3
    assert complete(tiny, **wants_b, stop_token_ids=[B], min_tokens=3, max_tokens=3)["usage"]["completion_tokens"] == 3


def test_bad_words_and_tokens_that_are_not_allowed_do_not_come(tiny):
    wants = {"logit_bias": {A: 99, B: 50}}
    assert text_of(tiny, **wants, bad_words=["A"]) == "B" * 12
    assert text_of(tiny, **wants, bad_words=["AA", "€)"]) == "AB" * 6
    found = text_of(tiny, temperature=50, seed=3, allowed_token_ids=[A, C], logit_bias={END: 99})
    assert set(found) == {"A", "C"}
    assert len(found) == 12, "the end is not among them"
    assert text_of(tiny, allowed_token_ids=[A, END], logit_bias={END: 99}) == ""
    assert text_of(tiny, ignore_eos=True, bad_words=["B"], logit_bias={END: 99, C: 98}) == "C" * 12


def test_the_best_of_several_is_given(tiny):
    drawn = {"temperature": 20, "seed": 5, "max_tokens": 4}
    each = complete(tiny, **drawn, n=6, logprobs=0)["choices"]
    means = {choice["text"]: sum(choice["logprobs"]["token_logprobs"]) / 4 for choice in each}
    best = sorted(means, key=lambda text: means[text], reverse=True)
    found = complete(tiny, **drawn, n=2, best_of=6)
    assert [choice["text"] for choice in found["choices"]] == best[:2]
    assert [(choice["index"], choice["logprobs"]) for choice in found["choices"]] == [(0, None), (1, None)]
    assert found["usage"]["completion_tokens"] == 24, "of all six"


def test_the_last_message_goes_on(tiny):
    prompt, goes_on = [*b"user: Hi\nassistant: so"], {"continue_final_message": True}
    asked = chat(tiny, SO, **goes_on, return_token_ids=True)
    assert asked["prompt_token_ids"][-len(prompt) :] == prompt
    said = asked["choices"][0]["message"]["content"]
    echoed = {**goes_on, "add_generation_prompt": False, "echo": True}
    assert said_in(tiny, SO, **echoed) == f"so{said}"
    deltas = streamed(tiny, CHAT, messages=SO, **echoed, max_tokens=2)
    assert deltas[0]["choices"][0]["delta"]["content"] == "so"
    ended = chat(tiny, add_generation_prompt=False, return_token_ids=True)
    assert bytes(ended["prompt_token_ids"][1:]).endswith(b"user: Hi\n")
    assert said_in(tiny, SO, **goes_on, conversation="prefilled") == said
    assert tiny.get("/sessions/prefilled").json()["messages"][1]["content"].startswith(f"so{said[:4]}")


def test_a_template_gets_its_variables(tiny):
    """`tests/decoder/text/test_tokenizer.py` has what a template does with them."""
    given = tiny.post(CHAT, json={**HI, "chat_template_kwargs": {"enable_thinking": False}})
    assert (given.status_code, "symphony-ignored" in given.headers) == (200, False)
    for route in (CHAT, MESSAGES, f"{MESSAGES}/count_tokens"):
        taken = post(tiny, route, HI, chat_template_kwargs={"messages": []}, status=400)
        assert "messages cannot be given as a variable" in json.dumps(taken)


def test_a_stop_text_and_special_tokens_are_kept_where_they_are_wanted(tiny):
    options = {"logit_bias": {B: 99}, "stop": ["BB"]}
    assert text_of(tiny, **options) == ""
    assert text_of(tiny, **options, include_stop_str_in_output=True) == "BB"
    pieces = streamed(tiny, "/v1/completions", prompt="Hi", **options, include_stop_str_in_output=True)
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == "BB"
    pads = {"logit_bias": {PAD: 99}, "max_tokens": 2}
    assert text_of(tiny, **pads, skip_special_tokens=False) == "<pad><pad>"
    assert text_of(tiny, **pads, skip_special_tokens=True) == ""


def test_a_prompt_is_cut(tiny):
    def prompt(**options):
        return complete(tiny, prompt=[A, B, C], return_token_ids=True, **options)["choices"][0]["prompt_token_ids"]

    assert prompt(truncate_prompt_tokens=2) == [B, C]
    assert prompt(truncate_prompt_tokens=2, truncation_side="right") == [A, B]
    assert prompt(truncate_prompt_tokens=-1) == [A, B, C]
    long = complete(tiny, prompt="x" * 100_000, truncate_prompt_tokens=-1)["usage"]
    most = tiny.get("/v1/models").json()["data"][0]["max_model_len"]
    assert long["total_tokens"] == most


def test_the_prompts_tokens_have_their_logprobs(tiny):
    asked = chat(tiny, prompt_logprobs=2, return_token_ids=True)
    first, *others = asked["prompt_logprobs"]
    assert first is None
    for token, entry in zip(asked["prompt_token_ids"][1:], others, strict=True):
        assert entry[str(token)]["decoded_token"]
        assert {each["rank"] for each in entry.values()} >= {1, 2}
        likeliest = max(each["logprob"] for each in entry.values() if each["rank"] is not None)
        assert entry[str(token)]["logprob"] <= likeliest <= 0
    choice = complete(tiny, prompt=[A, B, C], prompt_logprobs=0)["choices"][0]
    assert [each and list(each) for each in choice["prompt_logprobs"]] == [None, [str(B)], [str(C)]]


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_an_answer_has_its_tokens(tiny, route):
    def prompt_of(found):
        return (found if route == CHAT else found["choices"][0]).get("prompt_token_ids")

    body: dict[str, Any] = {"messages": HI["messages"]} if route == CHAT else {"prompt": "Hi"}
    body |= {"max_tokens": 6, "temperature": 0, "logit_bias": {B: 99}, "return_token_ids": True}
    whole, chunks = post(tiny, route, body), streamed(tiny, route, **body)
    assert whole["choices"][0]["token_ids"] == [B] * 6
    assert [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", ())] == [B] * 6
    assert prompt_of(chunks[0]) == prompt_of(whole) is not None
    assert {prompt_of(chunk) for chunk in chunks[1:]} == {None}


def test_what_repeats_becomes_unlikely_also_where_it_was_said_in_an_earlier_turn(tiny):
    wants_b = {"logit_bias": {B: 99, C: 50}}
    dry = {**wants_b, "dry_multiplier": 1000, "dry_allowed_length": 1}
    assert text_of(tiny, **wants_b, dry_multiplier=0) == "B" * 12
    assert text_of(tiny, **dry).startswith("BBC")
    assert text_of(tiny, **{**dry, "dry_allowed_length": 3}).startswith("BBBBC")
    assert text_of(tiny, **dry, dry_sequence_breakers=["\n", "B"]) == "B" * 12
    assert text_of(tiny, **dry, dry_penalty_last_n=0) == "B" * 12
    penalty = {**wants_b, "repeat_penalty": 1e6}
    assert text_of(tiny, **penalty, repeat_last_n=1) == "BC" * 6
    assert text_of(tiny, **penalty, repeat_last_n=0) == "B" * 12
    said_before = {**penalty, "prompt": "B" + "x" * 64}
    assert text_of(tiny, **said_before)[0] == "B", "64 tokens are looked at, as in llama.cpp"
    assert text_of(tiny, **said_before, repeat_last_n=-1)[0] == "C"
    of_turns = {"logit_bias": {B: 99, C: 50}, "conversation": "dry", "dry_multiplier": 1000}
    assert [said_in(tiny, **of_turns, dry_sequence_breakers=[])[0] for _ in range(2)] == ["B", "C"]


def test_surprise_is_near_the_entropy_or_near_what_is_wanted(tiny):
    drawn = {"temperature": 15, "seed": 1, "max_tokens": 1, "n": 24, "logit_bias": {B: 85}}
    said = [{choice["text"] for choice in complete(tiny, **drawn, typical_p=part)["choices"]} for part in (1, 0.1)]
    assert ["B" in texts for texts in said] == [True, False], "the likeliest is no surprise"
    hot = {"temperature": 5, "seed": 1, "top_k": 1}
    likeliest = text_of(tiny)
    assert text_of(tiny, **hot, mirostat=0) == likeliest
    for version in (1, 2):
        assert text_of(tiny, **hot, mirostat=version, mirostat_tau=100) != likeliest, "top_k is not looked at"
        assert text_of(tiny, **hot, mirostat=version, mirostat_tau=0, mirostat_eta=0) == likeliest


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format and guided_regex cons"),
        ({"guided_regex": "a", "min_tokens": 2}, "guided_regex and min_tokens constrain"),
        ({"min_tokens": 2, "stop": "x"}, "a stop text may end"),
        ({"min_tokens": 5}, "max_tokens is 4"),
        ({"bad_words": ["x"] * 65}, "bad_words"),
        ({"bad_words": [""]}, "bad_words"),
        ({"guided_choice": ["x"] * 1025}, "guided_choice"),
        ({"guided_grammar": "root ::= nothing"}, "gbnf"),
        ({"grammar": 'root ::= "' + "x" * 20_000 + '"'}, "16384 is the most"),
        ({"guided_regex": "("}, "regex"),
        ({"allowed_token_ids": [999]}, "allowed_token_ids"),
        ({"allowed_token_ids": [257]}, "does not end"),
        ({"allowed_token_ids": [65] * 4097}, "allowed_token_ids"),
        ({"stop_token_ids": [65] * 1025}, "stop_token_ids"),
        ({"stop_token_ids": [999]}, "999"),
        ({"logit_bias": {str(number): 1 for number in range(4097)}}, "4096 is the most"),
        ({"logit_bias": {"259": 1}}, "259 is no token"),
        ({"continue_final_message": True}, "not an answer"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 1, "conversation": "x"}, "truncate_prompt_tokens"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structural_tag is not done"),
        ({"dry_sequence_breakers": ["x"] * 100_000}, "dry_sequence_breakers"),
        ({"dry_sequence_breakers": ["x" * 1_000_000]}, "dry_sequence_breakers"),
        ({"dry_sequence_breakers": ["\u20ac" * 22]}, "dry_sequence_breakers"),
        ({"dry_sequence_breakers": ["\0"]}, "dry_sequence_breakers"),
        ({"dry_sequence_breakers": ["nowhere"], "dry_multiplier": 1}, "'nowhere' is in no token"),
        ({"repeat_penalty": 2, "repetition_penalty": 2}, "give one"),
        ({"max_completion_tokens": 2}, "max_completion_tokens and max_tokens are one thing"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_not_done_or_too_much_is_refused_by_its_name(tiny, options, words):
    error = post(tiny, CHAT, {**HI, "max_tokens": 4, **options}, status=400)["error"]
    assert words in error["message"]
    assert error["param"] or options.keys() & {"grammar", "guided_grammar", "guided_regex"}, "the daemon reads these"


def test_the_best_of_a_stream_or_of_fewer_than_are_wanted_is_not_known(tiny):
    for options in ({"best_of": 2, "stream": True}, {"best_of": 1, "n": 2}):
        assert post(tiny, COMPLETIONS, prompt="Hi", **options, status=400)["error"]["param"] == "best_of"
