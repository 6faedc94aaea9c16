"""The page at /, in a real browser, with the real gateway and the real model behind it."""

import json
import shutil
import signal
import socket
import threading
import time
from urllib.parse import quote

import pytest

from tests.lips.gateway.conftest import Gateway
from tests.symphony.browser import Browser

WIDTH, HEIGHT = 1100, 700
SHOWN = """document.getElementById("tip").hidden ? null : [...document.querySelectorAll("#tip tr")]
    .map((row) => [row.className, row.cells[0].textContent, row.cells[1].textContent])"""
NAMES = """[...document.querySelectorAll("#sessions span:first-child")].map((each) => each.textContent)"""
PLACE = """(() => {
    const { left, top, width, height } = document.querySelectorAll(".token")[%d].getBoundingClientRect();
    return [left + width / 2, top + height / 2];
})()"""
FOCUSED = """document.activeElement.id || document.activeElement.closest("ul, details")?.id || "more" """


@pytest.fixture
def browser(tmp_path):
    if shutil.which("chromium") is None:
        pytest.skip("PAGE NOT OPENED IN A BROWSER: there is no chromium")
    browser = Browser(tmp_path / "profile", WIDTH, HEIGHT)
    yield browser
    browser.close()


@pytest.fixture
def page(browser, gateway, http):
    """The page, open, with no conversation of other tests."""
    for each in http.get("/sessions").json()["sessions"]:
        http.delete(f"/sessions/{quote(each['name'], safe='')}")
    browser.go(gateway.url)
    until(browser, """document.getElementById("model").textContent !== "" """)
    yield browser
    assert browser.complaints == []


def until(browser, condition, seconds=30):
    end_s = time.monotonic() + seconds
    while not (found := browser.run(condition)):
        assert time.monotonic() < end_s, f"{condition}: {browser.run('document.body.innerText')}"
        time.sleep(0.05)
    return found


def press(browser, key, text=""):
    for kind in ("keyDown", "keyUp"):
        more = {"text": text} if text and kind == "keyDown" else {}
        number = {"Enter": 13, "Escape": 27, "Tab": 9}.get(key, 0)
        browser.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=number, **more)


def say(browser, text, *, ends=True):
    browser.run("""document.getElementById("question").focus()""")
    browser.ask("Input.insertText", text=text)
    press(browser, "Enter", text="\r")
    if ends:
        until(browser, """!document.getElementById("send").hidden && document.querySelectorAll(".token").length > 0""")
        until(browser, f"{NAMES}.length > 0")


def click(browser, element):
    browser.run(f"""document.getElementById({json.dumps(element)}).click()""")


@pytest.mark.slow
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
    until(page, """/^[0-9.]+ %$/.test(document.getElementById("kv").textContent)""")


@pytest.mark.slow
def test_an_answer_is_stopped_by_a_key(page, http):
    page.run("""document.getElementById("max_tokens").value = 4000""")
    say(page, "Write a very long story.", ends=False)
    until(page, """document.querySelectorAll(".token").length > 3""")
    press(page, "Escape")
    until(page, """document.getElementById("status").textContent.startsWith("Stopped")""")
    end_s = time.monotonic() + 5
    while "symphony_gateway_running 0\n" not in http.get("/metrics").text:
        assert time.monotonic() < end_s, "it goes on"


@pytest.mark.slow
def test_text_is_text_whatever_it_says(page, http):
    broken = "<img src=x onerror=\"document.title='broken'\">"
    body = {"messages": [{"role": "user", "content": broken}], "max_tokens": 2, "conversation": broken.replace("/", "")}
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    page.run("location.reload()")
    until(page, f"{NAMES}.length === 1")
    page.run("""document.querySelector("#sessions button").click()""")
    until(page, """document.querySelectorAll(".turn.user").length === 1""")
    assert broken in page.run("""document.querySelector(".turn.user p").textContent""")
    assert page.run("""document.querySelectorAll("img").length""") == 0
    assert page.run("document.title") == "Symphony"


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_key_is_asked_for_where_one_is_needed(browser, start_gateway, tmp_path):
    from lips.gateway.keys import new_key

    key, line = new_key("page")
    path = tmp_path / "keys"
    path.write_text(line + "\n")
    path.chmod(0o600)
    browser.go(start_gateway("--keys", str(path)).url)
    until(browser, """document.getElementById("status").textContent.includes("Settings: Key")""")
    browser.run(f"""document.getElementById("key").value = {json.dumps(key)};
        document.getElementById("key").dispatchEvent(new Event("change"))""")
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
        while not self.has_to_end.is_set():
            try:
                connection, _ = self.listener.accept()
            except TimeoutError:
                continue
            with connection:
                connection.settimeout(5)
                self.heard.append(connection.recv(1 << 16).decode())
                said = b'data: {"proof": "' + b"0" * 64 + b'"}\n\n'
                connection.sendall(
                    b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(said) + said
                )

    def end(self):
        self.has_to_end.set()
        self.join()
        self.listener.close()
        return self.heard


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_whoever_takes_the_port_is_not_sent_the_key(browser, gateway_daemon, number):
    """The page has it from its address, and goes on when the gateway is there again."""
    gateway = Gateway(gateway_daemon, blind=True)
    port = gateway.url.rpartition(":")[2]
    filled = """/^[0-9.]+ %$/.test(document.getElementById("kv").textContent)"""
    try:
        browser.go(f"{gateway.url}/#key={gateway.key}")
        until(browser, filled)
        assert browser.run("location.href") == f"{gateway.url}/"
        assert browser.run("Object.values(sessionStorage).length + Object.values(localStorage).length") == 0
        gateway.process.send_signal(number)
        gateway.process.wait(60)
        impostor = Impostor(int(port))
        browser.run("""document.getElementById("kv").textContent = "?" """)
        until(browser, """document.getElementById("kv").textContent !== "?" """)
        say(browser, "Hello.", ends=False)
        until(browser, """document.querySelector(".wrong")?.textContent.includes("does not know the key")""")
        heard = impostor.end()
        assert any(each.startswith("GET /proof?challenge=") for each in heard)
        assert not any("authorization" in each.lower() or gateway.key in each for each in heard)
        gateway = Gateway(gateway_daemon, "--port", port, blind=True)
        until(browser, filled)
        gateway.stop()
    finally:
        gateway.process.kill()
        gateway.process.wait()


@pytest.mark.slow
def test_without_webcrypto_the_key_is_sent_only_for_what_the_user_does(browser, gateway_daemon):
    gateway = Gateway(gateway_daemon, blind=True)
    try:
        browser.ask(
            "Page.addScriptToEvaluateOnNewDocument",
            source="""Object.defineProperty(Crypto.prototype, "subtle", { value: undefined });
            const send = fetch;
            window.sent = [];
            window.fetch = (path, ...more) => { sent.push(path); return send(path, ...more); };""",
        )
        browser.go(gateway.url)
        browser.run(f"""document.getElementById("key").value = {json.dumps(gateway.key)};
            document.getElementById("key").dispatchEvent(new Event("change")); sent.length = 0""")
        say(browser, "Hello.")
        time.sleep(2.5)  # two polls
        assert set(browser.run("sent")) == {"/v1/chat/completions", "/sessions"}
        gateway.stop()
    finally:
        gateway.process.kill()
        gateway.process.wait()
