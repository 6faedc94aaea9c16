"""Answers from documents, and a program's own cache: the most popular documents stay."""

import os
from collections import Counter

import pytest

import libsym as sym
from lips.rag import Shelf, answer, find, read, under

pytestmark = pytest.mark.slow
DOCUMENTS = {
    "bees.md": "Bees make honey. They live in hives, and they eat nectar.",
    "ants.md": "Ants live in hills under the ground, and they eat seeds.",
    "wasps.md": "Wasps build nests of paper. Some of the wasps eat bees.",
}
ABOUT = {"bees.md": "What is honey made by?", "ants.md": "What do ants eat?", "wasps.md": "Who builds nests of paper?"}
MAX_TOKENS = 4


def num_tokens(document):
    return len(sym.chat_tokens([under(document)], add_generation_prompt=False))


def ask(shelf, name, documents=DOCUMENTS):
    found, text = answer(shelf, documents, ABOUT[name], MAX_TOKENS)
    assert found == name
    return text


def kept():
    return {entry.name.rpartition("-")[0] for entry in sym.kv_list("rag")}


@pytest.fixture
def shelf(lips):
    return Shelf("rag", 10_000)


@pytest.fixture
def bees(tmp_path):
    (tmp_path / "bees.md").write_text(DOCUMENTS["bees.md"])
    return str(tmp_path)


def test_a_question_finds_the_document_with_its_rare_words():
    assert {question: find(question, DOCUMENTS) for question in ABOUT.values()} == {q: n for n, q in ABOUT.items()}
    eaters = {"often": "eat eat eat", "ants": "eat ants", "once": "eat"}
    assert find("eat eat eat ants", eaters) == "ants", "a word that all have says next to nothing"
    assert find("seeds", {"long.md": "seeds " + "word " * 500, "short.md": "seeds"}) == "short.md"


def test_a_word_is_looked_up_once_in_each_passage_however_many_there_are(monkeypatch):
    looked_up = []

    class Counted(Counter[str]):
        def __contains__(self, word: object) -> bool:
            looked_up.append(word)
            return super().__contains__(word)

    monkeypatch.setattr("lips.rag.Counter", Counted)
    assert find("word 7", {str(number): f"word {number}" for number in range(50)}) == "7"
    assert len(looked_up) == 2 * 50


def test_the_second_question_on_a_document_computes_the_question_and_the_answer_is_the_same(shelf, computed):
    first, num_first = computed(ask, shelf, "bees.md")
    second, num_second = computed(ask, shelf, "bees.md")
    assert (second, num_first - num_second) == (first, num_tokens(DOCUMENTS["bees.md"]))
    question = sym.chat_tokens([under(DOCUMENTS["bees.md"]), {"role": "user", "content": ABOUT["bees.md"]}])
    assert num_second <= len(question) - num_tokens(DOCUMENTS["bees.md"]) + MAX_TOKENS - 1
    with sym.kv_create() as alone:
        assert sym.generate(alone, question, max_tokens=MAX_TOKENS).full_text().strip() == first


def test_the_least_asked_goes_first_and_not_the_least_recently_used(lips, computed):
    each = max(map(num_tokens, DOCUMENTS.values()))
    for _ in range(3):
        ask(Shelf("rag", 2 * each), "bees.md")  # the count is the file's: each run goes on with it
    (path,) = (lips.mount / "rag").iterdir()
    assert lips.daemon.shell(f"getfattr --only-values -n user.kv.priority '{path}'").stdout == "3"
    ask(Shelf("rag", 2 * each), "ants.md")
    assert kept() == {"bees.md", "ants.md"}
    ask(Shelf("rag", 2 * each), "wasps.md")
    assert kept() == {"bees.md", "wasps.md"}, "of the bees it is longer that somebody asked"
    assert computed(ask, Shelf("rag", 2 * each), "ants.md")[1] > num_tokens(DOCUMENTS["ants.md"])
    assert kept() == {"bees.md", "ants.md"}


def test_what_is_in_use_stays_though_it_alone_is_more_than_the_budget(lips):
    ask(Shelf("rag", 1), "ants.md")
    assert kept() == {"ants.md"}


def test_a_document_that_changes_is_computed_anew_and_what_is_gone_leaves_the_mount(shelf, computed):
    first = ask(shelf, "ants.md")
    ask(shelf, "bees.md")
    changed = {"ants.md": "Ants live in hills, and what ants eat is leaves."}
    assert computed(ask, shelf, "ants.md", changed)[1] > num_tokens(changed["ants.md"])
    assert kept() == {"ants.md"}
    (entry,) = sym.kv_list("rag")
    assert "leaves" in sym.detokenize(sym.kv_read(f"rag/{entry.name}")[0])
    assert ask(shelf, "ants.md") == first, "as it was before, it is as it was before"


def test_a_document_is_cut_at_its_headings_and_a_change_in_one_part_leaves_the_others(tmp_path, shelf, computed):
    (tmp_path / "sub").mkdir()
    path = tmp_path / "sub" / "insects.md"
    path.write_text("# Bees\nThey eat nectar.\n## Ants\nThey eat seeds.\n")
    (tmp_path / "picture.png").write_bytes(b"# no text")
    (tmp_path / "b.md").mkdir()
    (tmp_path / "c.md").symlink_to("gone")
    first = read(tmp_path)
    assert first == {"sub/insects.md:1": "# Bees\nThey eat nectar.\n", "sub/insects.md:2": "## Ants\nThey eat seeds.\n"}
    answer(shelf, first, "What do bees eat?", 1)
    path.write_text(path.read_text() + "They live in hills.\n")
    (name, _), num_computed = computed(answer, shelf, read(tmp_path), "What do bees eat?", 1)
    assert name == "sub/insects.md:1"
    assert num_computed < num_tokens(first[name])


def test_a_long_passage_is_cut_between_lines_or_within_one_and_all_of_it_can_be_asked_about(tiny, tmp_path):
    lines = [f"line {number} of many\n" for number in range(400)]
    (tmp_path / "long.md").write_text("".join(lines))
    found = read(tmp_path)
    assert "".join(found.values()) == "".join(lines)
    assert all(text.endswith("\n") and len(text) <= 2000 for text in found.values())
    told = tiny.run("rag", "--max-tokens", "2", str(tmp_path), "What is 399?")
    assert f"(long.md:{len(found) - 1};" in told
    (tmp_path / "long.md").write_text("x" * 5000)
    assert [len(passage) for passage in read(tmp_path).values()] == [2000, 2000, 1000]


def test_a_question_that_cannot_be_answered_is_told_and_leaves_others_their_answers(tiny, bees):
    told = tiny.run("rag", bees, "zzz qqq")
    assert told == "No passage has a word of this question.\n    (None; 0 tokens computed)\n"
    done = tiny.finish("rag", "--max-tokens", "3", bees, "honey " * 900, ABOUT["bees.md"])
    assert done.stdout.count("tokens computed") == 1
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("rag: 'honey honey ")
    assert "beyond the model's context" in done.stderr


def test_names_that_are_no_text_or_those_of_another_directory_are_shelves_and_documents_of_their_own(tiny, tmp_path):
    name = os.fsdecode(b"\xff.md:0")
    assert answer(Shelf("own", 100), {name: DOCUMENTS["bees.md"]}, ABOUT["bees.md"], 3)[0] == name
    for place in ("one", "two"):
        (tmp_path / place / "docs").mkdir(parents=True)
        (tmp_path / place / "docs" / "bees.md").write_text(DOCUMENTS["bees.md"] + place)
        tiny.run("rag", "--max-tokens", "1", str(tmp_path / place / "docs"), "bees")
    shelves = [entry.name for entry in sym.kv_list("rag")]
    assert [len(sym.kv_list(f"rag/{shelf}")) for shelf in shelves] == [1, 1]
    assert all(shelf.startswith("docs-") for shelf in shelves)
