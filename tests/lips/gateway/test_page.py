"""The page at /, in a real browser, with the real gateway and the real model behind it."""

import socket
import threading
import time
from contextlib import suppress
from urllib.parse import quote

import pytest

from tests.lips.gateway.conftest import Gateway, gateways
from tests.lips.gateway.pages import HEIGHT, TEXT, WIDTH, click, press, type_key, until
from tests.lips.gateway.wire import CHAT, post, running, user
from tests.lips.gateway.wire import until as until_true
from tests.symphony.browser import Browser

pytestmark = pytest.mark.slow

SHOWN = """document.getElementById("tip").hidden ? null : [...document.querySelectorAll("#tip tr")]
    .map((row) => [row.className, row.cells[0].textContent, row.cells[1].textContent])"""
NAMES = """[...document.querySelectorAll("#sessions span:first-child")].map((each) => each.textContent)"""
PLACE = """(() => {
    const { left, top, width, height } = document.querySelectorAll(".token")[%d].getBoundingClientRect();
    return [left + width / 2, top + height / 2];
})()"""
FILLED = f"""/^[0-9.]+ %$/.test({TEXT % "kv"})"""
FOCUSED = """document.activeElement.id || document.activeElement.closest("ul, details")?.id || "more" """


@pytest.fixture
def page(browser, gateway, http):
    """The page, open, with no conversation of other tests."""
    for each in http.get("/sessions").json()["sessions"]:
        http.delete(f"/sessions/{quote(each['name'], safe='')}")
    browser.go(gateway.url)
    until(browser, """document.getElementById("model").textContent !== "" """)
    yield browser
    assert browser.complaints == []


def say(browser: Browser, text: str, *, ends: bool = True) -> None:
    browser.run("""document.getElementById("question").focus()""")
    browser.ask("Input.insertText", text=text)
    press(browser, "Enter", text="\r")
    if ends:
        until(browser, """!document.getElementById("send").hidden && document.querySelectorAll(".token").length > 0""")
        until(browser, f"{NAMES}.length > 0")


def test_a_conversation_is_had_looked_into_forked_undone_and_exported(page, gateway, http):
    page.run("""document.getElementById("temperature").value = 0""")
    say(page, "What is the capital of France?")
    assert "Paris" in page.run("""document.querySelector(".turn.assistant p").textContent""")
    (name,) = page.run(NAMES)
    assert (gateway.files / "local" / "sessions" / f"{name}.kv").exists()

    x, y = page.run(PLACE % 1)
    page.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    rows = until(page, SHOWN)
    assert len(rows) >= 5
    assert [kind for kind, _, _ in rows].count("drawn") >= 1
    assert all(share.endswith(" %") for _, _, share in rows)
    page.ask("Input.dispatchMouseEvent", type="mouseMoved", x=5, y=5)
    assert page.run(SHOWN) is None

    page.run("""document.getElementById("log").focus()""")
    press(page, "ArrowRight")
    assert page.run(SHOWN), "the keyboard leads there, too"
    assert "%" in page.run("""document.getElementById("status").textContent""")
    press(page, "Escape")
    assert page.run(SHOWN) is None

    click(page, "fork")
    page.run("""document.getElementById("fork-name").value = "other" """)
    page.run("""document.getElementById("forking").requestSubmit()""")
    until(page, """document.getElementById("title").textContent === "other" """)
    assert sorted(until(page, f"{NAMES}.length === 2 && {NAMES}")) == sorted([name, "other"])
    say(page, "And of Italy?")
    until(page, """document.querySelectorAll(".turn.user").length === 2""")
    click(page, "undo")
    until(page, """document.querySelectorAll(".turn.user").length === 1""")
    link = page.run("""document.getElementById("export").href""")
    assert http.get(link).content == (gateway.files / "local" / "sessions" / "other.kv").read_bytes()
    until(page, FILLED)


def test_an_answer_is_stopped_by_a_key(page, http):
    page.run("""document.getElementById("max_tokens").value = 4000""")
    say(page, "Write a very long story.", ends=False)
    until(page, """document.querySelectorAll(".token").length > 3""")
    press(page, "Escape")
    until(page, """document.getElementById("status").textContent.startsWith("Stopped")""")
    until_true(lambda: running(http) == 0)


def test_text_is_text_whatever_it_says(page, http):
    broken = "<img src=x onerror=\"document.title='broken'\">"
    post(http, CHAT, messages=user(broken), max_tokens=2, conversation=broken.replace("/", ""))
    page.reload()
    until(page, f"{NAMES}.length === 1")
    page.run("""document.querySelector("#sessions button").click()""")
    until(page, """document.querySelectorAll(".turn.user").length === 1""")
    assert broken in page.run("""document.querySelector(".turn.user p").textContent""")
    assert page.run("""document.querySelectorAll("img").length""") == 0
    assert page.run("document.title") == "Symphony"


def test_all_that_can_be_used_has_a_name_and_can_be_reached_and_nothing_sticks_out(page):
    say(page, "Hello.")
    nodes = page.ask("Accessibility.getFullAXTree")["nodes"]
    used = {"button", "link", "textbox", "spinbutton", "log", "status", "navigation", "main"}
    found = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node["ignored"]]
    named = [each for each in found if each[0] in used - {"status", "main"}]
    assert {role for role, _ in found} >= {"button", "link", "textbox", "log", "status", "navigation", "main"}
    assert all(name for _, name in named), named
    reached = set()
    page.run("""document.body.focus()""")
    for _ in range(25):
        press(page, "Tab")
        reached.add(page.run(FOCUSED))
    assert reached >= {"new", "sessions", "undo", "fork", "export", "remove", "log", "question", "send"}
    for scheme in ("light", "dark"):
        page.prefer(scheme)
        for width in (WIDTH, 420):
            page.resize(width, HEIGHT)
            assert page.run("document.documentElement.scrollWidth") <= width


def test_a_key_is_asked_for_where_one_is_needed(browser, keyed):
    browser.go(keyed.gateway.url)
    until(browser, f"""{TEXT % "status"}.includes("Settings: Key")""")
    type_key(browser, keyed.key())
    say(browser, "Hello.")
    assert len(browser.run(NAMES)) == 1


class Impostor(threading.Thread):
    """Another user's server, on the port of a gateway that has ended: all that it is sent."""

    def __init__(self, port):
        super().__init__()
        self.listener = socket.create_server(("127.0.0.1", port))
        self.listener.settimeout(0.1)
        self.heard, self.has_to_end = [], threading.Event()
        self.start()

    def run(self):
        said = b'data: {"proof": "%s"}\n\n' % (b"0" * 64)
        head = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(said)
        while not self.has_to_end.is_set():
            with suppress(TimeoutError), self.listener.accept()[0] as connection:
                connection.settimeout(5)
                self.heard.append(connection.recv(1 << 16).decode())
                connection.sendall(head + said)

    def end(self):
        self.has_to_end.set()
        self.join()
        self.listener.close()
        return self.heard


def test_whoever_takes_the_port_is_not_sent_the_key(browser, gateway_daemon):
    """The page has it from its address, and goes on when the gateway is there again."""
    first = Gateway(gateway_daemon, blind=True)
    port, key = first.url.rpartition(":")[2], first.key
    try:
        browser.go(f"{first.url}/#key={key}")
        until(browser, FILLED)
        assert browser.run("location.href") == f"{first.url}/"
        assert browser.run("Object.values(sessionStorage).length + Object.values(localStorage).length") == 0
    finally:
        first.process.kill()
        first.process.wait(60)
    impostor = Impostor(int(port))
    browser.run(f"""{TEXT % "kv"} = "?" """)
    until(browser, f"""{TEXT % "kv"} !== "?" """)
    say(browser, "Hello.", ends=False)
    until(browser, """document.querySelector(".wrong")?.textContent.includes("does not know the key")""")
    heard = impostor.end()
    assert any(each.startswith("GET /proof?challenge=") for each in heard)
    assert not any("authorization" in each.lower() or key in each for each in heard)
    with gateways(gateway_daemon) as start:
        start("--port", port, blind=True)
        until(browser, FILLED)


@pytest.mark.parametrize("gateway", [True], indirect=True)
def test_without_webcrypto_the_key_is_sent_only_for_what_the_user_does(browser, gateway):
    source = """Object.defineProperty(Crypto.prototype, "subtle", { value: undefined });
        const send = fetch;
        window.sent = [];
        window.fetch = (path, ...more) => { sent.push(path); return send(path, ...more); };"""
    browser.ask("Page.addScriptToEvaluateOnNewDocument", source=source)
    browser.go(gateway.url)
    type_key(browser, gateway.key)
    browser.run("sent.length = 0")
    say(browser, "Hello.")
    time.sleep(2.5)  # two polls
    assert set(browser.run("sent")) == {"/v1/chat/completions", "/sessions"}
