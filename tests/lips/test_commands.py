"""Programs by their names: words of a short run, and refusals in one line."""

import re
import sys
from ast import literal_eval

import pytest

import libsym as sym

pytestmark = pytest.mark.slow
STORY = "Ada Lindqvist kept the lighthouse at Bergen. Her brother Tomas was a baker in Oslo, and her dog was Biscuit. "
HISTORY = ["The history of the city begins", "--window", "48", "--max-tokens", "20"]
CACHED = ["The end of it is", "--context", "{at}/text", "--budget", "48"]
COMPARED = [*CACHED, "--compare", " near"]
TWO = r".*perplexity.*\n48 entries.*perplexity.*\n"
SAYS = [
    ("beam", ["The", "--width", "2", "--max-tokens", "2"], r"( *-\d+\.\d+  'The.*'\n){2}"),
    ("smc", ["The", "--particles", "2", "--max-tokens", "2"], r"The.*\n"),
    ("tree_of_thought", ["Plan a day.", "--breadth", "2", "--keep", "1", "--depth", "1"], r"0\.\d\d\n  \d: .+\n"),
    ("graph_of_thought", ["3", "1", "2", "--ways", "2"], r"(\d ?){3}\n\d faults\n"),
    ("skeleton_of_thought", ["A tree?", "--points", "2", "--max-tokens", "20"], r"(\d\. .+\n   .+\n){2}"),
    ("recursion_of_thought", ["2", "3", "4"], r"\d+ \(it is 9\), 2 levels\n"),
    ("recursion_of_thought", ["30000", "40000"], r"70000 \(it is 70000\), 1 levels\n"),
    ("mcts", ["10", "--tokens", "60"], r"\d([-+*]\d){3} = -?\d+, \d+ rollouts\n"),
    (
        "reflexion",
        ["a function double(x) that gives twice x", "--test", "assert double(4) == 8"],
        r"def double\(x\)(.|\n)*# passed\n\n",
    ),
    ("self_consistency", ["What is 2 + 3?", "-n", "3"], r"(\d of 3: -?[\d.]+\n)+"),
    ("windowed", HISTORY, r"(.|\n){41,}"),
    ("sink", HISTORY, r"(.|\n){41,}"),
    ("sink", ["--compare", "{at}/text", "--window", "48"], r"(.*perplexity.*\n){3}"),
    *((name, COMPARED, TWO) for name in ("h2o", "tova", "snapkv")),
    *((name, [*CACHED, "--max-tokens", "12"], r"(.|\n){13,}") for name in ("h2o", "tova", "snapkv")),
]


@pytest.fixture
def words_of(tmp_path):
    (tmp_path / "text").write_text(STORY * 3)
    (tmp_path / "x").write_text("x")
    (tmp_path / "empty").touch()
    (tmp_path / "blank").write_text("\n")
    (tmp_path / "dir").mkdir()
    return lambda words: [word.replace("{at}", str(tmp_path)) for word in words]


@pytest.mark.parametrize(("name", "words", "says"), SAYS, ids=lambda each: each if isinstance(each, str) else "")
def test_a_command_says_what_it_found(lips, words_of, name, words, says):
    assert re.fullmatch(says, lips.run(name, *words_of(words)))


REFUSED = [
    ("completion", ["--temperature", "-1", "Once"], 2, "symphony run completion: "),
    ("score", ["{at}/text", "--context", "1"], 2, "--context"),
    ("score", ["{at}/empty"], 1, "no perplexity"),
    ("score", ["{at}/no"], 1, "No such file"),
    ("score", ["--after", "h", "ello there", "i"], 1, "'ello there' changes the first token"),
    ("healing", ["a"], 2, ""),
    ("contrastive", ["Once", "--window", "0"], 2, "symphony run contrastive: a"),
    ("samplers", ["Once", "--sampler", "none"], 2, "invalid choice: 'none'"),
    ("samplers", ["Once", "--seed", "-1"], 2, "argument --seed: '-1' is not 0 or more"),
    *((name, ["Once", "--key", "-1"], 2, "argument --key: '-1' is not 0 or more") for name in ("watermark", "gumbel")),
    ("editor", ["nodir"], 2, "argument directory: 'nodir': No such file or directory"),
    ("mapreduce", ["{at}/blank"], 2, ""),  # nothing is made up about an empty file
    ("rag", ["{at}/dir", "Who?"], 2, "there is no text in files *.md or *.txt"),
    ("rlm", ["Where?", "none.kv"], 1, "rlm: none.kv: no such file\n"),
    ("swarm", ["What?"], 1, "start it with `symphony run`"),
    *((name, ["Once", "--window", size], 2, "") for name in ("windowed", "sink") for size in ("8", "99999")),
    *((name, ["One", "--budget", "8"], 2, "") for name in ("h2o", "tova", "snapkv")),
    ("sink", ["--compare", "{at}/x"], 1, "no log-probabilities"),
    ("recursion_of_thought", ["-3", "4"], 2, ""),
    ("constrained", ["Who?", "--schema", "a.json"], 1, "constrained: the schema 'a.json' is no JSON"),
    ("constrained", ["Who?", "--schema", '{"type": "strin"}'], 1, "constrained: the json grammar"),
    (
        "self_consistency",
        ["What is 2 + 3?", "-n", "2", "--max-tokens", "1"],
        1,
        "self_consistency: none of 2 answers comes to a number within 1 tokens\n",
    ),
    (
        "reflexion",
        ["nothing", "--test", "assert False, 'no'", "--attempts", "1"],
        1,
        "reflexion: no attempt of 1 has passed\n",
    ),
    *(
        ("mcp_client", ["Does it rain?", "--", *server], 1, f"mcp_client: the server {server[0]}: Connection closed\n")
        for server in (["false"], [sys.executable, "-c", "import sys; sys.stdin.readline()"])
    ),
]


@pytest.mark.parametrize(
    ("name", "words", "status", "says"), REFUSED, ids=lambda each: each if isinstance(each, str) else ""
)
def test_what_cannot_be_done_is_told_in_one_line(request, words_of, name, words, status, says):
    programs = request.getfixturevalue("lips" if name == "score" else "tiny")  # tokens of several letters are refused
    assert says in programs.refused(name, *words_of(words), status=status)


@pytest.mark.parametrize("name", ["ngram", "jacobi", "tree_speculation", "beam", "contrastive"])
def test_drafts_and_contexts_end_where_the_models_context_is_full(tiny, name):
    """The text leaves room for 21 tokens. Each method finds those of greedy decoding, and one behind them."""
    most = sym.model_info().max_positions
    text = ("ab" * most)[: most - 21]
    expected = text + sym.generate(sym.kv_create(), sym.tokenize(text)).full_text()
    more = {"beam": ["--width", "1"], "contrastive": ["--beta", "0"]}.get(name, [])
    said = tiny.run(name, text, "--max-tokens", "200", *more)
    shown = literal_eval(said[8:].strip()) if name == "beam" else said.removesuffix("\n")
    assert shown == expected
    assert len(sym.tokenize(shown)) == most + 1


def test_the_shortest_and_the_longest_texts_are_gone_on_with(tiny):
    most = sym.model_info().max_positions
    template = len(sym.chat_tokens([{"role": "user", "content": ""}]))
    assert len(tiny.run("snapkv", "x", "--max-tokens", "3")) > 1
    assert tiny.run("snapkv", "x", "--compare", "yz").count("perplexity") == 2
    text = "ab" * (most // 2 - 4)
    shown = tiny.run("smc", text, "--particles", "2", "--max-tokens", "60")
    assert shown.startswith(text)
    assert len(shown) > len(text) + 1
    shown = tiny.run("best_of_n", "a" * (most - template - 3), "-n", "2", "--all")
    assert len(re.findall(r"^\[-\d+\.\d+\] ", shown, re.MULTILINE)) == 2
    for room, told in ((3, "ask: the answer ends where the context is full\n"), (9, "")):
        assert tiny.finish("ask", "--max-tokens", "6", "a" * (most - template - room)).stderr == told
