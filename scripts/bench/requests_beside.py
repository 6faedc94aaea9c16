#!/usr/bin/env python3
"""Ten requests that users send by habit, to the gateway and to other servers: what becomes of each field.

    .venv/bin/python scripts/bench/requests_beside.py [--server NAME=URL ...] [--save NAME]
    .venv/bin/python scripts/bench/requests_beside.py --quick      # the gateway alone, with the tiny model

Every verdict is read from the answer: *obeyed* fields show in its text, its count of tokens or its objects; the header
`symphony-ignored` *names* fields without effect; *silent* is the rest. *refused* has the server's words. The script
fails where the gateway is silent about a field. How servers are started is in workloads/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import re
import sys
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent / "crowds"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "workloads"))  # its `programs` is not this directory's

from attacked import processor
from gateway import gateway
from sides import symphony_side

ROOT, RESULTS = Path(__file__).resolve().parents[2], Path(__file__).resolve().parent / "results"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
OURS = "symphony"
RUNNING = ("symphony_gateway_running", "vllm:num_requests_running", "llamacpp:requests_processing")
"""Gauges of answers under way, by server."""
PATIENCE_S = 300
GOES_ON_S = 20
SHOWN = 48
_HEADERS = {"content-type": "application/json", "connection": "close"}
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Seen:
    """An answer."""

    status: int
    body: dict[str, Any]
    named: frozenset[str] = frozenset()
    """Fields of the header."""

    @property
    def choice(self) -> dict[str, Any]:
        found: dict[str, Any] = self.body["choices"][0]
        return found

    @property
    def text(self) -> str:
        return str(self.choice["message"]["content"] if "message" in self.choice else self.choice["text"])

    @property
    def num_tokens(self) -> int:
        return int(self.body["usage"]["completion_tokens"])

    @property
    def finish(self) -> str:
        return str(self.choice["finish_reason"])


Shows = Callable[[Seen], bool | None]
"""Whether an answer shows that a field is obeyed; None: another field's fate hides this one's."""


@dataclass(frozen=True)
class Habit:
    """A request."""

    name: str
    route: str
    body: dict[str, Any]
    shows: dict[str, Shows] = field(default_factory=dict)
    """Fields of the request that are looked at."""


def never(_: Seen) -> bool:
    """No answer shows this field."""
    return False


def habits(a: int, b: int, c: int) -> list[Habit]:
    """The requests. Three tokens, whose texts are a, b and c: what the model wants is said by biases."""
    hi, greedy = {"messages": [{"role": "user", "content": "Say hi"}]}, {"temperature": 0}
    wants_c = {str(a): 50, str(b): 10, str(c): 100}
    return [
        Habit("no parameters", CHAT, hi),
        Habit("a slip: `temprature`", CHAT, {**hi, "max_tokens": 8, "temprature": 0}, {"temprature": never}),
        Habit(
            "`guided_json`, as to vLLM before 0.12",
            CHAT,
            {**hi, **greedy, "max_tokens": 24, "guided_json": SCHEMA},
            {"guided_json": lambda seen: re.fullmatch(r'\{\s*"colour":\s*"(red|blue)"\s*\}', seen.text) is not None},
        ),
        Habit(
            "`stop` and `include_stop_str_in_output`",
            TEXT,
            {"prompt": "Hi", **greedy, "max_tokens": 8, "logit_bias": {str(a): 90}, "stop": ["aa"]}
            | {"include_stop_str_in_output": True},
            {
                "stop": lambda seen: seen.finish == "stop" and seen.text in ("", "aa"),
                "include_stop_str_in_output": lambda seen: seen.text == "aa" if seen.finish == "stop" else None,
            },
        ),
        Habit(
            "`min_tokens` and `stop_token_ids`",
            TEXT,
            {"prompt": "Hi", **greedy, "max_tokens": 12, "logit_bias": {str(a): 90}, "stop_token_ids": [a]}
            | {"min_tokens": 5},
            {
                "stop_token_ids": lambda seen: seen.finish == "stop",
                "min_tokens": lambda seen: seen.num_tokens >= 5 if seen.finish == "stop" else None,
            },
        ),
        Habit(
            "`logit_bias` and `allowed_token_ids`",
            CHAT,
            {**hi, **greedy, "max_tokens": 6, "logit_bias": wants_c, "allowed_token_ids": [a, b]},
            {
                "logit_bias": lambda seen: set(seen.text) in ({"a"}, {"c"}),
                "allowed_token_ids": lambda seen: set(seen.text) <= {"a", "b"},
            },
        ),
        Habit(
            "`structured_outputs`, `prompt_logprobs` and `return_token_ids`, as to vLLM",
            CHAT,
            {**hi, "max_tokens": 8, "structured_outputs": {"choice": ["left", "right"]}}
            | {"prompt_logprobs": 1, "return_token_ids": True},
            {
                "structured_outputs": lambda seen: seen.text in {"left", "right"},
                "prompt_logprobs": lambda seen: bool(seen.body.get("prompt_logprobs")),
                "return_token_ids": lambda seen: bool(seen.choice.get("token_ids")),
            },
        ),
        Habit(
            "`grammar`, `n_predict` and `repeat_penalty`, as to llama.cpp",
            TEXT,
            {"prompt": "Hi", **greedy, "logit_bias": wants_c, "grammar": "root ::= [ab]+", "n_predict": 6}
            | {"repeat_penalty": 1e6},
            {
                "grammar": lambda seen: set(seen.text) <= {"a", "b"},
                "n_predict": lambda seen: seen.num_tokens == 6,
                "repeat_penalty": lambda seen: len(set(seen.text)) > 1,
            },
        ),
        Habit(
            "an unknown field, and `max_tokens` beyond the context",
            CHAT,
            {**hi, **greedy, "logit_bias": {str(a): 90}, "stop": ["aa"], "max_tokens": 100_000, "frobnicate": True},
            {"max_tokens": lambda seen: seen.status == 200, "frobnicate": never},
        ),
        Habit("a client that goes away after three events", CHAT, {**hi, "ignore_eos": True, "stream": True}),
    ]


class Server:
    """A server by its URL."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self._address = urllib.parse.urlsplit(url).netloc
        self._model = json.loads(self._asked("GET", "/v1/models").read())["data"][0]["id"]

    def _asked(self, method: str, path: str, body: object = None) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self._address, timeout=PATIENCE_S)
        connection.request(method, path, json.dumps(body) if body else None, _HEADERS)
        return connection.getresponse()

    def ask(self, habit: Habit) -> Seen:
        answer = self._asked("POST", habit.route, {"model": self._model, **habit.body})
        named = answer.getheader("symphony-ignored") or ""
        return Seen(answer.status, json.loads(answer.read()), frozenset(named.split(", ")))

    def tokens(self, text: str) -> list[int]:
        answer = self._asked("POST", "/tokenize", {"prompt": text, "special": False})
        return list(json.loads(answer.read())["tokens"])

    def leave(self, habit: Habit) -> str:
        """Close a stream, and say when the server has nothing under way any more."""
        answer = self._asked("POST", habit.route, {"model": self._model, **habit.body})
        if answer.status != 200:
            return f"refused: {said_of(json.loads(answer.read()))}"
        for _ in range(6):  # an event, and the line behind it
            answer.readline()
        assert self._running() > 0, f"{self.name} has ended before its client went"
        answer.close()
        began_s = time.monotonic()
        while self._running():
            if time.monotonic() - began_s > GOES_ON_S:
                return f"goes on {GOES_ON_S} s later"
            time.sleep(0.02)
        return "the generation ends"

    def _running(self) -> float:
        lines = self._asked("GET", "/metrics").read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(RUNNING))


def said_of(body: dict[str, Any]) -> str:
    """A server's words about a refused request."""
    error = body.get("error", body)
    return str(error.get("message", error) if isinstance(error, dict) else error).split("\n")[0][:200]


def verdicts(habit: Habit, seen: Seen) -> dict[str, str]:
    """Return the fate of each field that is looked at."""
    if seen.status != 200:
        return {"": f"refused: {said_of(seen.body)}"}
    found = {}
    for name, shows in habit.shows.items():
        obeyed = shows(seen)
        found[name] = "named" if name in seen.named else {True: "obeyed", False: "silent", None: "not seen"}[obeyed]
    return found


def row(server: Server, habit: Habit) -> tuple[list[str], list[str]]:
    """Cells of the table, and the fates of what is looked at."""
    if habit.body.get("stream"):
        said = server.leave(habit)
        return [server.name, "", said, "", ""], [said.partition(":")[0]]
    seen = server.ask(habit)
    found = verdicts(habit, seen)
    told = ", ".join(f"`{name}` {fate}" if name else fate for name, fate in found.items())
    if seen.status != 200:
        return [server.name, str(seen.status), told, "", ""], ["refused"]
    text = " ".join(seen.text.split())
    shown = (text if len(text) <= SHOWN else f"{text[:SHOWN]}…").replace("`", "'").replace("|", "\\|")
    counted = f"{seen.num_tokens}, {seen.finish}"
    return [server.name, "200", told, counted, f"`{shown}`" if shown else ""], list(found.values())


def compared(servers: list[Server], first: int, fates: Counter[tuple[str, str]]) -> Iterator[str]:
    """Lines of the table. `fates`: counted by server."""
    [a], [b], [c] = map(servers[0].tokens, "abc")
    for number, habit in [*enumerate(habits(a, b, c), 1)][first - 1 :]:
        shown = {name: value for name, value in habit.body.items() if name not in {"messages", "prompt"}}
        yield f"\n**{number}. {habit.name}** ({habit.route})\n\n    {json.dumps(shown)}\n"
        yield "| server | status | fields | tokens, end | text |\n|---|---|---|---|---|"
        for server in servers:
            cells, found = row(server, habit)
            fates.update((server.name, fate) for fate in found)
            yield f"| {' | '.join(cells)} |"
    columns = ("obeyed", "named", "silent", "refused")
    yield f"\nFields by fate; a refused request is one.\n\n| server | {' | '.join(columns)} |\n|---|---|---|---|---|"
    for server in servers:
        yield f"| {server.name} | {' | '.join(str(fates[server.name, each] or '') for each in columns)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", action="append", default=[], metavar="NAME=URL")
    parser.add_argument("--save", metavar="NAME", help="write results/NAME.md")
    parser.add_argument("--quick", action="store_true", help="the gateway alone, with the tiny model")
    args = parser.parse_args()
    model, fates = "tiny" if args.quick else "smollm2", Counter[tuple[str, str]]()
    lines = [f"{processor()}; {model}, bf16; {time.strftime('%Y-%m-%d')}"]
    with contextlib.ExitStack() as stack:
        _, daemon = stack.enter_context(symphony_side("bf16", model, ROOT, ()))
        url, _ = stack.enter_context(gateway(daemon))
        servers = [Server(OURS, url), *(Server(*each.split("=", 1)) for each in args.server)]
        print(lines[0])
        for line in compared(servers, 2 if args.quick else 1, fates):  # the tiny model never ends by itself
            print(line, flush=True)
            lines.append(line)
    if args.save:
        (RESULTS / f"{args.save}.md").write_text("\n".join(lines) + "\n")
    if fates[OURS, "silent"]:
        sys.exit(f"the gateway is silent about {fates[OURS, 'silent']} of the fields")


if __name__ == "__main__":
    main()
