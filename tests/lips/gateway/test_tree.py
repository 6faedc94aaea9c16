"""The page at /tree, in a real browser: forks as they live, the text of a file, hostile names, and who sees what."""

import json
import os
from contextlib import ExitStack

import pytest

from lips.gateway.tree import MAX_STREAMS
from tests.lips.gateway.conftest import gateways
from tests.lips.gateway.pages import HEIGHT, WIDTH, press, until
from tests.lips.gateway.test_doors import OTHER, needs_root
from tests.lips.gateway.wire import CHAT, post, user
from tests.symphony.daemons import a_daemon

pytestmark = pytest.mark.slow

ROWS = """[...document.querySelectorAll("[role=treeitem]")].map((each) => each.textContent)"""
LEVELS = """[...document.querySelectorAll("[role=treeitem]")].map((each) => Number(each.getAttribute("aria-level")))"""
STATUS = """document.getElementById("status").textContent"""
TREE = """
base = sym.kv_create("base.kv")
sym.kv_write(base, list(b"The capital of France is Paris."))
plan = sym.kv_fork(base, "plan.kv")
sym.kv_write(plan, list(b" And of Italy?"))
fork = sym.kv_fork(plan)
sym.kv_write(fork, list(b"Rome"))
print(flush=True)
sys.stdin.readline()
fork.close()
print(flush=True)
sys.stdin.readline()
sym.kv_remove("base.kv")
sym.kv_remove("plan.kv")
"""
MARKUP, RTL, ESCAPES = "<img src=x onerror=alert(1)>", "a\u202egnp.exe", "b\x1b[2J\x07.kv"
HOSTILE = f"""
for name in {[MARKUP, RTL, ESCAPES]!r}:
    with sym.kv_create(name) as kv:
        sym.kv_write(kv, list(b"<script>document.title='broken'</script>\\x1b[31m \\xe2\\x80\\xaeabc"))
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A gateway before a daemon without files of other tests. Tokens of its model are bytes."""
    with a_daemon(tmp_path_factory.mktemp("tree"), "--model", "tiny") as daemon, gateways(daemon) as start:
        yield start()


@pytest.fixture
def tiny(here):
    with here.client() as client:
        yield client


@pytest.fixture
def tree(browser, here):
    """The page, open."""
    browser.go(f"{here.url}/tree")
    yield browser
    assert browser.complaints == []


def names(page):
    return [row.split(",")[0] for row in page.run(ROWS)]


def focus(page):
    page.run("""document.getElementById("tree").focus()""")


@pytest.fixture
def program(here):
    """A program that makes two files and a fork, closes the fork after a line, and ends after another."""
    program = here.daemon.program(TREE)
    program.stdout.readline()
    yield program
    program.communicate("\n\n", timeout=60)


def test_a_fork_is_seen_while_it_lives_and_fades_when_it_is_closed(tree, program):
    until(tree, f"""{ROWS}.some((row) => row.includes("49 tokens, 45 shared"))""")
    base, plan, fork = tree.run(ROWS)
    assert base.startswith("base.kv, 31 tokens")
    assert plan.startswith("plan.kv, 45 tokens, 31 shared")
    assert fork.startswith("fork #")
    assert tree.run(LEVELS) == [1, 2, 3]
    program.stdin.write("\n")
    program.stdin.flush()
    until(tree, f"""{ROWS}.some((row) => row.endsWith(", closed"))""")
    until(tree, f"{ROWS}.length === 2")


def test_the_keyboard_opens_closes_and_reads_and_each_token_has_its_alternatives(tree, program):
    until(tree, f"{ROWS}.length === 3")
    focus(tree)
    press(tree, "ArrowDown")
    selected = """document.querySelector("[aria-selected=true]")"""
    until(tree, f"{selected} !== null")
    assert tree.run("""document.getElementById(document.getElementById("tree").getAttribute("aria-activedescendant"))
        .textContent""").startswith("base.kv")
    press(tree, "ArrowLeft")
    until(tree, f"{ROWS}.length === 1")
    assert tree.run(f"""{selected}.getAttribute("aria-expanded")""") == "false"
    press(tree, "ArrowRight")
    until(tree, f"{ROWS}.length === 3")
    press(tree, "ArrowRight")
    until(tree, f"""{selected}.textContent.startsWith("plan.kv")""")
    press(tree, "Enter")
    until(tree, """document.querySelectorAll("#log .token").length === 45""")
    assert tree.run("""document.getElementById("log").textContent""") == "The capital of France is Paris. And of Italy?"
    tree.run("""document.getElementById("odds").click()""")
    until(tree, f"""{STATUS}.startsWith("Probabilities of 45 tokens")""")
    tree.run("""document.getElementById("log").focus()""")
    for _ in range(2):  # nothing precedes the first token
        press(tree, "ArrowRight")
    until(tree, """!document.getElementById("tip").hidden""")
    assert tree.run("""document.querySelectorAll("#tip tr").length""") >= 5
    press(tree, "Escape")
    assert tree.run("""document.getElementById("tip").hidden""")
    assert program.poll() is None


def test_probabilities_are_those_of_the_model_and_leave_nothing_behind(tiny, here, program):
    daemon = here.daemon
    assert tiny.get("/tree/tokens?path=plan.kv").json()["tokens"] == 45  # the first request makes directories
    before = daemon.stat()["used_files"]
    odds = tiny.post("/tree/odds", json={"path": "plan.kv", "first": 0}).json()["odds"]
    assert (len(odds), odds[0]) == (45, None)
    expected = daemon.run(
        """
        tokens = list(b"The capital of France is Paris. And of Italy?")
        with sym.kv_create() as kv:
            rows = sym.pred(kv, tokens, rows="all")
            print([rows[at].logprob(token) for at, token in enumerate(tokens[1:])])
        """
    )
    assert [each["logprob"] for each in odds[1:]] == pytest.approx(json.loads(expected), abs=1e-3)
    assert "".join(each["token"] for each in odds[1:]) == "he capital of France is Paris. And of Italy?"
    part = tiny.post("/tree/odds", json={"path": "plan.kv", "first": 40}).json()["odds"]
    assert [each["logprob"] for each in part] == pytest.approx([each["logprob"] for each in odds[40:]], abs=1e-3)
    assert daemon.stat()["used_files"] == before


def test_names_and_texts_are_text_whatever_they_say(tree, here):
    here.daemon.run(HOSTILE)
    try:
        until(tree, f"{ROWS}.length === 3")
        assert sorted(names(tree)) == sorted([MARKUP, "a\ufffdgnp.exe", "b\ufffd[2J\ufffd.kv"])
        focus(tree)
        for _ in range(3):
            press(tree, "ArrowDown")
            press(tree, "Enter")
            until(tree, """document.querySelectorAll("#log .token").length > 40""")
            tree.run("""document.getElementById("log").replaceChildren()""")
        press(tree, "Enter")
        until(tree, """document.querySelectorAll("#log .token").length > 40""")
        shown = tree.run("""document.getElementById("log").textContent""")
        assert shown.startswith("<script>document.title='broken'</script>\ufffd[31m ")
        assert tree.run("""document.querySelectorAll("img, #log script").length""") == 0
        assert tree.run("document.title") == "Symphony: the tree of files"
    finally:
        here.daemon.run(f"for name in {[MARKUP, RTL, ESCAPES]!r}: sym.kv_remove(name)")


def test_of_many_files_few_are_elements_and_a_search_finds_one(tree, here):
    make = """
    sym.kv_mkdir("many")
    with sym.kv_create("many/base.kv") as base:
        sym.kv_write(base, [7] * 3)
        for number in range(1000):
            sym.kv_fork(base, f"many/fork-{number}.kv").close()
    """
    try:
        here.daemon.run(make)
        until(tree, """document.getElementById("num-files").textContent === "1001" """)
        assert 5 < len(tree.run(ROWS)) < 60
        assert tree.run("""document.querySelector("[role=treeitem]").getAttribute("aria-expanded")""") == "true"
        focus(tree)
        press(tree, "End")
        until(tree, f"""{ROWS}.some((row) => row.startsWith("many/fork-999.kv"))""")
        tree.run("""document.getElementById("search").focus()""")
        tree.ask("Input.insertText", text="FORK-77.kv")
        until(tree, f"{ROWS}.length === 2")
        assert names(tree) == ["many/base.kv", "many/fork-77.kv"]
    finally:
        here.daemon.run("import shutil; shutil.rmtree(os.path.join(sym.model_info().mount, 'many'))")


def test_forks_of_forks_fade_however_deep_they_are(tree, here):
    chain = here.daemon.program(
        """
        kv = sym.kv_create()
        sym.kv_write(kv, [7] * 3)
        for _ in range(15_000):
            fork = sym.kv_fork(kv)
            kv.close()
            kv = fork
        print(flush=True)
        sys.stdin.read()
        """
    )
    assert chain.stdout.readline() == "\n"
    until(tree, """document.getElementById("num-forks").textContent === "1" """)
    tree.run("""window.faults = []; window.onerror = (text) => { window.faults.push(text); }""")
    chain.communicate(timeout=60)
    until(tree, f"{ROWS}.length === 0")
    assert tree.run("window.faults") == []


def test_all_that_can_be_used_has_a_name_and_can_be_reached_and_nothing_sticks_out(tree, program):
    until(tree, f"{ROWS}.length === 3")
    nodes = tree.ask("Accessibility.getFullAXTree")["nodes"]
    found = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node["ignored"]]
    used = {"button", "link", "searchbox", "combobox", "tree", "treeitem", "log", "complementary"}
    assert {role for role, _ in found} >= used - {"link"}
    assert all(name for role, name in found if role in used), found
    reached = set()
    for _ in range(12):
        press(tree, "Tab")
        reached.add(tree.run("document.activeElement.id"))
    assert reached >= {"search", "colours", "tree", "log"}
    for scheme in ("light", "dark"):
        tree.prefer(scheme)
        for width in (WIDTH, 420):
            tree.resize(width, HEIGHT)
            assert tree.run("document.documentElement.scrollWidth") <= width
            assert tree.run("document.getElementById('canvas').clientWidth") > 100


def told(client, since=0):
    """The first event of the stream."""
    with client.stream("GET", f"/tree/changes?since={since}") as answer:
        assert answer.status_code == 200
        line = next(each for each in answer.iter_lines() if each.startswith("data: "))
    return json.loads(line.removeprefix("data: "))


def test_a_key_shows_its_own_tenants_files_and_forks_and_no_others(keyed):
    ann, bob = keyed.client(), keyed.client()
    with ann, bob:
        post(ann, CHAT, messages=user("Hello."), max_tokens=2, conversation="secret")
        seen = told(ann)
        assert "sessions/secret.kv" in [each.get("path") for each in seen["files"]]
        assert seen["whole"]
        assert told(bob)["files"] == []
        assert ann.get("/tree/tokens", params={"path": "sessions/secret.kv"}).json()["tokens"] > 2
        for path in ("sessions/secret.kv", "../secret.kv", "/etc/passwd"):
            assert bob.get("/tree/tokens", params={"path": path}).status_code in {400, 403, 404}
            refused = bob.post("/tree/odds", json={"path": path, "first": 0})
            assert refused.status_code in {400, 403, 404}, refused.text
    with keyed.gateway.client() as nobody:
        for path in ("/tree/changes", "/tree/tokens?path=a"):
            assert nobody.get(path).status_code == 401


@needs_root
def test_another_account_with_the_one_key_sees_no_files(here, program):
    "localhost".encode("idna")  # the other account may not read the module
    with here.client(here.key) as client:
        os.seteuid(OTHER)
        try:
            assert client.get("/v1/models").status_code == 200
            refused = [client.get("/tree/changes"), client.get("/tree/tokens?path=plan.kv")]
            refused.append(client.post("/tree/odds", json={"path": "plan.kv", "first": 0}))
        finally:
            os.seteuid(0)
    assert [each.status_code for each in refused] == [403] * 3
    assert "of its own account" in refused[1].text
    assert program.poll() is None


def test_a_stream_ends_when_its_key_is_withdrawn(keyed):
    key = keyed.key(name="withdrawn")
    with keyed.gateway.client(key) as client, client.stream("GET", "/tree/changes") as answer:
        events = (json.loads(each.removeprefix("data: ")) for each in answer.iter_lines() if each)
        assert next(events)["whole"]
        kept = [line for line in keyed.path.read_text().splitlines(keepends=True) if not line.startswith("withdrawn ")]
        keyed.path.write_text("".join(kept))
        assert next(events)["error"]["code"] == "invalid_api_key"
        assert not list(events)


@pytest.mark.parametrize("path", [".", "plan.kv/a"])
def test_a_path_that_is_no_file_is_refused(tiny, program, path):
    assert tiny.get("/tree/tokens", params={"path": path}).status_code in {400, 404}
    assert tiny.post("/tree/odds", json={"path": path, "first": 0}).status_code in {400, 404}
    assert program.poll() is None


@pytest.mark.parametrize("query", ["since=-1", "since=x", "since=" + "9" * 30, "since=\u0661"])
def test_a_number_that_is_none_is_refused(tiny, query):
    assert tiny.get(f"/tree/changes?{query}").status_code == 400


@pytest.mark.parametrize(
    "body", [{}, {"path": "a"}, {"path": 1, "first": 0}, {"path": "a", "first": -1}, {"path": "a", "first": True}]
)
def test_a_request_for_probabilities_names_a_file_and_a_token(tiny, body):
    assert tiny.post("/tree/odds", json=body).status_code == 400


def test_a_tenant_has_few_streams(keyed):
    with keyed.client() as client, ExitStack() as streams:
        lines = [streams.enter_context(client.stream("GET", "/tree/changes")).iter_lines() for _ in range(MAX_STREAMS)]
        for each in lines:
            next(each)
        assert client.get("/tree/changes").status_code == 429
    with keyed.client() as client:
        assert told(client)["whole"]
