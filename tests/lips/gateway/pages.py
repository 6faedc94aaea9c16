"""Steps of tests in a browser."""

import json
import time
from typing import Any

from tests.symphony.browser import Browser

WIDTH, HEIGHT = 1100, 700
TEXT = """document.getElementById("%s").textContent"""


def until(browser: Browser, condition: str) -> Any:
    end_s = time.monotonic() + 60
    while not (found := browser.run(condition)):
        assert time.monotonic() < end_s, f"{condition}: {browser.run('document.body.innerText')}"
        time.sleep(0.05)
    return found


def press(browser, key, text=""):
    for kind in ("keyDown", "keyUp"):
        more = {"text": text} if text and kind == "keyDown" else {}
        number = {"Enter": 13, "Escape": 27, "Tab": 9}.get(key, 0)
        browser.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=number, **more)


def click(browser, element):
    browser.run(f"""document.getElementById({json.dumps(element)}).click()""")


def type_key(browser, key):
    browser.run(f"""document.getElementById("key").value = {json.dumps(key)};
        document.getElementById("key").dispatchEvent(new Event("change"))""")
