"""A long conversation becomes a short one: a summary, and the last turns as they were."""

import pytest

import libsym as sym
from lips import compact
from tests.lips.scripted import scripted

pytestmark = pytest.mark.slow
ANSWERS = ["I am Sym, and I answer.", "The sea is blue, and deep.", "Paris is in France.", "Rome is in Italy."]


def talk(path):
    with scripted(ANSWERS), sym.Chat(sym.kv_create(path), "You are brief.") as chat:
        for question in ("Who are you?", "What is the sea?", "Where is Paris?", "Where is Rome?"):
            chat.ask(question).full_text()


def test_the_new_file_has_the_summary_and_the_last_turns_word_for_word(tiny):
    talk("talk.kv")
    old = sym.kv_read("talk.kv")
    with sym.kv_open("talk.kv") as kv, scripted(["We spoke."]):
        before, after = compact.compact(kv, "short.kv", 2, 20, "You are brief.")
    text = sym.detokenize(sym.kv_read("short.kv")[0])
    top = {"role": "system", "content": compact.TOP.format(system="You are brief.", summary="We spoke.")}
    turns = [
        {"role": role, "content": content}
        for question, answer in (("Where is Paris?", ANSWERS[2]), ("Where is Rome?", ANSWERS[3]))
        for role, content in (("user", question), ("assistant", answer))
    ]
    whole = sym.chat_template([top, *turns], add_generation_prompt=False)
    assert whole.startswith(text)
    assert whole[len(text) :].strip() in {"", "<|im_end|>"}
    assert (before, after) == (len(old[0]), len(sym.kv_read("short.kv")[0]))
    assert after < before
    assert sym.kv_read("talk.kv") == old, "the original is kept"


def test_the_conversation_goes_on_and_its_turns_can_be_undone(tiny):
    talk("talk.kv")
    shown = tiny.run("compact", "talk.kv", "short.kv", "--keep", "1", "--max-tokens", "8")
    assert shown.startswith("talk.kv has ")
    before = sym.kv_read("short.kv")
    with sym.Chat(sym.kv_open("short.kv", "rw")) as chat:
        assert chat.ask("And Oslo?", max_tokens=4).full_text()
        chat.undo()
        assert chat.kv.read()[0] == before[0][: chat.kv.len()]
        assert len(before[0]) - chat.kv.len() <= 2, "but for what ends a turn"


def test_what_would_be_no_shorter_is_not_made(tiny):
    talk("talk.kv")
    for arguments, about in (
        (["--keep", "4"], "the last 4 stay: none is left to summarize"),
        (["--max-tokens", "9999"], "no room for a summary of 9999 tokens"),
        (["--max-tokens", "1"], "name is taken"),
    ):
        if "taken" in about:
            sym.kv_create("short.kv").close()
        computed = sym.daemon_stat()["num_tokens"]
        assert about in tiny.refused("compact", "talk.kv", "short.kv", *arguments)
        assert sym.daemon_stat()["num_tokens"] == computed, "the model is not asked"
    with sym.kv_open("talk.kv") as kv, scripted(["so " * 120]), pytest.raises(sym.Invalid, match="nothing is saved"):
        compact.compact(kv, "long.kv", 2, 300, "You are brief.")
