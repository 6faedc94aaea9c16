"""A headless browser under a test's fingers, by Chromium's own protocol over two pipes."""

import base64
import json
import os
import select
import subprocess
import time
from pathlib import Path

WITHIN_S = 90
_IN, _OUT = 3, 4
"""The browser's descriptors."""


class Browser:
    """A headless browser with one page; `complaints` are messages of the page's console."""

    def __init__(self, profile: Path, width: int, height: int) -> None:
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        command += [f"--user-data-dir={profile}", f"--window-size={width},{height}"]
        shell = f'exec "$@" {_IN}<&{theirs_in} {_OUT}>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "browser", *command], pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._buffer = b""
        self._number = self._num_loads = 0
        self._session: dict[str, str] = {}
        self.complaints: list[str] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Runtime", "Log", "Page"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters):
        """A command, and its result; what the console says meanwhile is kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters, **self._session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._number:
                assert "error" not in found, found
                return found["result"]
            self._note(found)

    def _note(self, event) -> None:
        if event.get("method") in {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"}:
            self.complaints.append(json.dumps(event["params"])[:500])
        self._num_loads += event.get("method") == "Page.loadEventFired"

    def _next(self):
        deadline_s = time.monotonic() + WITHIN_S
        while b"\0" not in self._buffer:
            assert select.select([self._from], [], [], max(0.0, deadline_s - time.monotonic()))[0], "no answer"
            more = os.read(self._from, 1 << 20)
            assert more, "the browser has gone"
            self._buffer += more
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def go(self, url: str) -> None:
        self._load("Page.navigate", url=url)

    def reload(self) -> None:
        self._load("Page.reload")

    def _load(self, method: str, **parameters: str) -> None:
        before = self._num_loads
        self.ask(method, **parameters)
        while self._num_loads == before:
            self._note(self._next())

    def run(self, script: str):
        """The value of an expression, or of what it promises."""
        result = self.ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def prefer(self, scheme: str) -> None:
        """`light` or `dark`."""
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def resize(self, width: int, height: int) -> None:
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def picture(self) -> bytes:
        """A PNG of what is seen."""
        return base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"])

    def close(self) -> None:
        os.close(self._to)
        os.close(self._from)
        self._process.terminate()
        self._process.wait(WITHIN_S)
