#!/usr/bin/env python3
"""Conversations in which several parties act concurrently: no turn is lost, and no file has text that no party was
shown.

Two gateways and three `Chat` processes talk in the same files, over real sockets. Workers drive them: each worker picks
one of its conversations, lets up to three parties act on it at the same time, and then reads the file. A party asks
(whole, streamed, with a stop text, by both names of a session, with a deadline, in a directory with a small quota),
undoes, forks, exports, deletes or moves. A party may read only a part of an answer, stall, leave in the middle, or be
killed. A third gateway has a key with a small quota and a time limit on answers. Sometimes a gateway is killed.
Sometimes the daemon and the gateways restart; the daemon then ends by SIGTERM or, after a sync, by kill -9.

The script knows the text that each party got. From these texts the script computes the possible contents of the file,
for every order in which the actions may have taken effect. If a file has other contents, the script prints the actions
on it, and ends.

Run as a user who may mount, with the repository's interpreter:
.venv/bin/python scripts/soak/conversations.py --operations 100000
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import queue
import random
import re
import signal
import string
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY), str(Path(__file__).parent)]

import httpx  # noqa: E402 - the path comes first
from crashes import Daemons  # noqa: E402

import libsym as sym  # noqa: E402
from lips.gateway.file_names import file_name  # noqa: E402
from lips.gateway.keys import new_key  # noqa: E402

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
FORM = '"[a-y]{3,24}"'
LONG_FORM = '"[a-y]{1200}"'
STOPPING_FORM = '"[a-y]{1,8}z[a-y]{4}"'
SLACK_CHARS = 700
"""Largest number of characters in flight to a client that disconnects. Such answers have 1,200 characters."""
SETTLED_S = 20.0
TURN = re.compile(r'(?:system: (s\d+)\n)?user: (q\d+)\?\nassistant: ("[a-z]*"?|)(?:\n|$)')
MOST_TURNS, MOST_CHARS = 12, 1800

State = tuple[tuple[str, "str | Part"], ...]


@dataclass(frozen=True, slots=True)
class Part:
    """Answer whose reader left. The file has at least the text that was sent, and at most `slack` characters more."""

    text: str
    slack: int = SLACK_CHARS
    least: int = 0

    def fits(self, answer: str) -> bool:
        return answer.startswith(self.text) and self.least <= len(answer) <= len(self.text) + self.slack


# Effect of an action on the file: a function from the state before to the possible states after.
Effect = Callable[[State], list[State]]


def nothing(state: State) -> list[State]:
    return [state]


def turn(question: str, answer: str | Part) -> Effect:
    return lambda state: [(*state, (question, answer))]


def perhaps(effect: Effect) -> Effect:
    return lambda state: [state, *effect(state)]


def undone(state: State) -> list[State]:
    return [state[:-1]] if state else []


def empty_only(state: State) -> list[State]:
    return [] if state else [state]


def gone(_state: State) -> list[State]:
    return [()]


def becomes(state: State) -> Effect:
    return lambda _before: [state]


@dataclass(slots=True)
class Done:
    """Action of a party on a conversation, with its possible effects in order."""

    what: str
    effects: list[Effect] = field(default_factory=list)
    alone: Effect | None = None
    """Effect of the action if no other party acted at the same time."""
    seen: list[State] = field(default_factory=list)
    """Contents of the conversation that the party read during the action."""
    unless_killed: tuple[Gateway, int, Effect] | None = None
    """A gateway, the number of its kills before the action, and an effect. The effect is also possible if the gateway
    has been killed since.
    """


class Wrong(Exception):  # noqa: N818 - a finding
    """Error: a file has contents that no order of the actions explains."""


def fits(pattern: State, found: State) -> bool:
    return len(pattern) == len(found) and all(
        wanted[0] == there[0]
        and (wanted[1].fits(str(there[1])) if isinstance(wanted[1], Part) else wanted[1] == there[1])
        for wanted, there in zip(pattern, found, strict=True)
    )


def reachable(before: State, done: list[Done]) -> tuple[list[State], list[State]]:
    """Return two lists over all orders of the actions: the possible states at the end, and the possible states at any
    moment.
    """
    last, ever = [], [before]
    for order in itertools.permutations(done):
        states = [before]
        for each in order:
            for effect in each.effects:
                states = list(dict.fromkeys(after for state in states for after in effect(state)))
                ever += states
        last += states
    # A copy may have a turn that is dropped later, or a finished turn without its last tokens. A copy never has a part
    # of an answer that a gateway still generates. Answers to `Chat` processes may end early, by a deadline or a kill.
    ended = list(dict.fromkeys(ever))
    for each in done:
        ends = [Part("", 2000)] if re.search("^chat|killed", each.what) else [Part("", 28), Part("", 2000, least=1180)]
        for number in re.findall(r"\bq(\d+)", each.what):
            asked = (f"q{number}", f"s{number}+q{number}")
            ever += [(*state, (question, end)) for state in ended for question in asked for end in ends]
    return list(dict.fromkeys(last)), list(dict.fromkeys(ever))


def parsed(text: str) -> State:
    """Return all turns of a text. Wrong: the text has a part that does not belong to a turn."""
    body, found, at = text.removeprefix("<bos>"), [], 0
    while at < len(body):
        match = TURN.match(body, at)
        if match is None:
            raise Wrong(f"no turn begins at {body[at : at + 60]!r}, behind {body[max(0, at - 60) : at]!r}")
        found.append((f"{match[1]}+{match[2]}" if match[1] else match[2], match[3]))
        at = match.end()
    return tuple(found)


def system_of(state: State) -> str | None:
    """Return the system message at the beginning of a conversation, if it has one."""
    return state[0][0].partition("+")[0] if state and "+" in state[0][0] else None


def questions() -> Iterator[str]:
    return (f"q{number}" for number in itertools.count(1))


# ---- the parties ---------------------------------------------------------------------------------------------------


class Gateway:
    """Gateway that may be killed and started again."""

    def __init__(self, environment: dict[str, str], options: Sequence[str] = (), key: str = "") -> None:
        self._environment = environment
        self._options = options
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._turn = threading.Lock()
        self.url = ""
        self.num_kills = 0
        self.process: subprocess.Popen[str] | None = None
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lips.gateway", "--port", "0", *self._options],
            stderr=subprocess.PIPE, text=True, env=self._environment, cwd=REPOSITORY,
        )  # fmt: skip
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        if not line.startswith("gateway: http://"):
            raise SystemExit(f"the gateway did not start: {line}{self.process.stderr.read()}")
        self.url = line.split()[1]
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()

    @staticmethod
    def _read(process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            if "Traceback" in line:
                print("gateway:", line, process.stderr.read(4000), flush=True)

    def client(self) -> httpx.Client:
        # Reading certificates would take 50 ms of each request.
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False, verify=False, headers=self._headers)

    def kill(self) -> None:
        with self._turn:
            assert self.process is not None
            self.num_kills += 1
            self.process.kill()
            self.process.wait()
            self.start()

    def stop(self) -> None:
        assert self.process is not None
        self.process.terminate()
        self.process.wait(60)


class Talker:
    """`Chat` process that reads commands and prints results, each as one line."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--client"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self._environment,
        )  # fmt: skip

    def do(self, **command: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline() or '{"error": "gone"}')
        return answer

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.start()

    def stop(self) -> None:
        self.process.communicate()


def client() -> None:
    """Run as a `Chat` process."""
    chat: sym.Chat | None = None
    pieces: Any = iter(())
    for line in sys.stdin:
        command = json.loads(line)
        said: dict[str, Any] = {}
        try:
            match command["do"]:
                case "open":
                    chat = sym.Chat(sym.kv_open(command["path"], command.get("flags", "a")))
                case "ask":
                    assert chat is not None
                    said["text"] = ""
                    answer = chat.ask(
                        command["text"],
                        grammar=sym.Grammar.regex(command["form"]),
                        stop=command["stop"],
                        sampler=sym.Sampler(temperature=1.0),
                        deadline=command.get("deadline"),
                    )
                    pieces = answer.text()
                    for number, piece in enumerate(pieces, 1):
                        said["text"] += piece
                        if number == command.get("pieces"):
                            break
                case "rest":
                    said["text"] = "".join(pieces)
                    assert chat is not None
                    said["is_full"] = chat.kv.len() >= sym.model_info().max_positions - 1
                case "fork":
                    assert chat is not None
                    chat.fork().close()
                case "cut":
                    assert chat is not None
                    said["turns"] = turns = chat.kv.stat().turns
                    if turns:
                        sym.kv_truncate(chat.kv, turns[-1])
                case "undo":
                    assert chat is not None
                    chat.undo()
                case "close":
                    if chat is not None:
                        chat.close()
                    chat = None
        except sym.SymError as error:
            said["error"] = type(error).__name__
        print(json.dumps(said), flush=True)


# ---- a world -------------------------------------------------------------------------------------------------------


class World:
    """The daemon, the parties, and the possible states of each conversation."""

    def __init__(self, base: Path, draw: random.Random) -> None:
        self.daemons = Daemons(base, ["--kv-memory", "512M"], forked=False)
        self.base = base
        self.draw = draw
        self.questions = questions()
        self.lock = threading.Lock()
        self._pause = threading.Condition()
        self._num_going, self._is_restarting = 0, False
        self.small_key, line = new_key("small")
        self._keys = base / "keys"
        self._keys.write_text(f"{line} quota=1M\n")
        self._keys.chmod(0o600)
        self.begin()

    def begin(self) -> None:
        self.daemons.start()
        os.environ["SYMPHONY_SOCKET"] = str(self.daemons.socket)
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "XDG_STATE_HOME": str(self.base / "of_gateway")}
        self.gateways = [Gateway(environment) for _ in range(2)]
        self.small = Gateway(environment, ["--keys", str(self._keys), "--timeout", "0.3"], self.small_key)
        self.talkers: queue.Queue[Talker] = queue.Queue()
        for _ in range(3):
            self.talkers.put(Talker(environment))
        sym.connect(str(self.daemons.socket))
        with self.gateways[0].client() as http:
            http.get("/sessions").raise_for_status()
        self.sessions = self.daemons.mount / f"gateway-{os.geteuid()}/local/sessions"

    def end(self, number: int = signal.SIGTERM) -> None:
        for gateway in (*self.gateways, self.small):
            gateway.stop()
        while not self.talkers.empty():
            self.talkers.get().stop()
        if number == signal.SIGKILL:
            for entry in sym.kv_list(str(self.sessions)):
                with sym.kv_open(str(self.sessions / entry.name)) as kv:
                    sym.kv_sync(kv)
            subprocess.run(["sync", self.sessions], check=True)  # makes deletions durable
        sym.close()
        self.daemons.end(number)

    @contextmanager
    def going(self) -> Iterator[None]:
        """Prevent restarts within the block."""
        with self._pause:
            self._pause.wait_for(lambda: not self._is_restarting)
            self._num_going += 1
        try:
            yield
        finally:
            with self._pause:
                self._num_going -= 1
                self._pause.notify_all()

    def restart(self) -> None:
        """Restart the daemon and the gateways while no party acts."""
        with self._pause:
            self._is_restarting = True
            self._pause.wait_for(lambda: not self._num_going)
        try:
            self.end(self.draw.choice((signal.SIGTERM, signal.SIGKILL)))
            self.begin()
        finally:
            with self._pause:
                self._is_restarting = False
                self._pause.notify_all()

    def question(self) -> str:
        with self.lock:
            return next(self.questions)

    @contextmanager
    def talker(self) -> Iterator[Talker]:
        one = self.talkers.get()
        try:
            yield one
        finally:
            self.talkers.put(one)

    def read(self, path: str, *, in_part: bool = False, is_there: bool = False) -> State:
        """Return the turns in a file. No turn may be in progress. With `in_part` the file is a copy, and its last turn
        may be in progress.

        Unless `is_there`, a missing or invalid file counts as empty.
        """
        end_s = time.monotonic() + SETTLED_S
        while True:
            try:
                with sym.kv_open(path) as kv, sym.kv_lock(kv, blocking=False):
                    text = sym.detokenize(kv.read()[0])
                break
            except (sym.NotFound, sym.Invalid) as error:
                if is_there:
                    raise Wrong(f"{path} is no conversation: {error}") from error
                return ()
            except sym.WouldBlock as error:
                if time.monotonic() > end_s:
                    raise Wrong(f"nobody acts, and {error}") from None
                time.sleep(0.01)
        try:
            return parsed(text)
        except Wrong:
            if not in_part:
                raise
            return parsed(text[: text.rfind("\nuser: ") + 1])

    def is_full(self, path: str) -> bool:
        return sym.kv_stat(path).tokens >= sym.model_info().max_positions - 1


class Conversation:
    """A conversation by name: its file, its known state and its history."""

    def __init__(self, world: World, name: str, draw: random.Random) -> None:
        self.world = world
        self.name = name
        self.draw = draw
        self.file = world.sessions / f"{file_name(name)}.kv"
        self.state: State = ()
        self.history: list[str] = []

    @property
    def path(self) -> str:
        return str(self.file)

    # Each action returns its possible effects as a `Done`.

    def whole(self, *, stop: bool = False) -> Done:
        question = self.world.question()
        body = self._body(question, STOPPING_FORM if stop else FORM) | ({"stop": ["z"]} if stop else {})
        return self._posted("whole" + " with a stop text" * stop, question, {**body, "conversation": self.name})

    def stopped(self) -> Done:
        return self.whole(stop=True)

    def streamed(self) -> Done:
        question = self.world.question()
        body = {**self._body(question, FORM), "conversation": self.name, "stream": True}
        return self._streamed("streamed", question, body, None)

    def left(self) -> Done:
        """Read some pieces of a long answer, and disconnect."""
        question = self.world.question()
        body = {**self._body(question, LONG_FORM), "conversation": self.name, "stream": True}
        return self._streamed("left", question, body, self.draw.randrange(1, 12))

    def stalled(self) -> Done:
        """Read some pieces of a long answer, pause, and read the rest."""
        question = self.world.question()
        body = {**self._body(question, LONG_FORM), "conversation": self.name, "stream": True}
        stall = self.draw.randrange(1, 6), self.draw.choice((0.1, 0.4))
        return self._streamed("stalled", question, body, None, stall)

    def left_unsent(self) -> Done:
        """Disconnect before the gateway can have sent a long unstreamed answer."""
        question, gateway = self.world.question(), self.draw.choice(self.world.gateways)
        body = {**self._body(question, LONG_FORM), "conversation": self.name}
        done = Done(f"{question} left unsent", [nothing])
        done.unless_killed = gateway, gateway.num_kills, turn(question, Part("", 2000))
        with gateway.client() as http, suppress(httpx.HTTPError):
            answer = http.post(CHAT, json=body, timeout=self.draw.choice((0.01, 0.05, 0.15)))
            if answer.status_code == 200:
                done.effects = [turn(question, content(answer))]
        return done

    def told(self) -> Done:
        """Ask with a system message. A repeated message changes nothing, and a new one becomes part of the turn."""
        question, first = self.world.question(), system_of(self.state)
        system = first if first is not None and self.draw.random() < 0.5 else f"s{question[1:]}"

        def effect(question: str, answer: str | Part) -> Effect:
            return lambda state: turn(question if system_of(state) == system else f"{system}+{question}", answer)(state)

        body = {**self._body(f"{system}+{question}", FORM), "conversation": self.name}
        return self._posted("told", question, body, effect)

    def session(self) -> Done:
        """Ask as a client that sends the whole conversation each time. Such a client names its conversation in the
        field `session_id`.
        """
        if any("+" in question for question, _ in self.state):
            return self.whole()  # an undo cannot find the beginning of a turn that has a system message ("+")
        question = self.world.question()
        said = [message for each in self.state for message in messages(*each)]
        body = {**self._body(question, FORM), "session_id": self.name}
        body["messages"] = said + body["messages"]
        done = Done(f"{question} as a session", [nothing])
        try:
            with self._client() as http:
                answer = http.post(CHAT, json=body)
        except httpx.HTTPError:
            done.effects = [perhaps(becomes((*self.state, (question, Part("")))))]
            return done
        if answer.status_code == 200:
            done.alone = becomes((*self.state, (question, content(answer))))
            done.effects = [perhaps(done.alone)]  # beside a turn of another party the file may stay unchanged
        return done

    def undo(self) -> Done:
        return self._did("undo", lambda http: http.post(f"/sessions/{self._quoted}/undo"), undone, empty_only)

    def delete(self) -> Done:
        return self._did("delete", lambda http: http.delete(f"/sessions/{self._quoted}"), gone, empty_only)

    def fork(self) -> Done:
        """Fork the conversation, read the copy, and delete the copy."""
        copy = f"copy-{self.world.question()}"
        done = Done("fork", [nothing])
        with suppress(httpx.HTTPError), self._client() as http:
            answer = http.post(f"/sessions/{self._quoted}/fork", json={"to": copy})
            if answer.status_code == 200:
                done.seen.append(self.world.read(str(self.world.sessions / f"{copy}.kv"), in_part=True))
                http.delete(f"/sessions/{copy}")
        return done

    def export(self) -> Done:
        """Export the conversation. The image must be whole, even while other parties act."""
        done, gateway = Done("export", [nothing]), self.draw.choice(self.world.gateways)
        num_kills = gateway.num_kills
        place = self.world.sessions / f".{self.world.question()}.kv"
        try:
            with gateway.client() as http:
                answer = http.get(f"/sessions/{self._quoted}/export")
            if answer.status_code == 200:
                place.write_bytes(answer.content)
                done.seen.append(self.world.read(str(place), in_part=True, is_there=True))
                place.unlink()
        except httpx.ConnectError:
            pass  # the gateway was killed, and does not run again yet
        except (httpx.HTTPError, OSError) as error:
            if gateway.num_kills == num_kills:
                raise Wrong(f"{self.name}: its export is no image: {error!r}") from error
        return done

    def chat(self) -> Done:
        """Let a `Chat` process ask, undo, and read only a part of an answer."""
        done = Done("chat")
        with self.world.talker() as talker:
            if "error" in talker.do(do="open", path=self.path):
                return done
            for _ in range(self.draw.randrange(1, 4)):
                if self.draw.random() < 0.25:
                    error = talker.do(do="undo").get("error")
                    done.what += f", undo {error or ''}"
                    done.effects.append(undone if error is None else empty_only if error == "Invalid" else nothing)
                    if error == "WouldBlock":
                        break
                    continue
                if done.effects and self.draw.random() < 0.15:
                    done.what += f", cut {(said := talker.do(do='cut'))}"
                    done.effects += [undone] if said["turns"] else []
                    continue
                question, pieces = self.world.question(), self.draw.choice((None, None, 1, 3))
                form, stop = (
                    self.draw.choice(((FORM, []), (STOPPING_FORM, ["z"]))) if pieces is None else (LONG_FORM, [])
                )
                deadline = self.draw.choice((None, None, None, 0.02))
                said = talker.do(do="ask", text=f"{question}?", form=form, stop=stop, pieces=pieces, deadline=deadline)
                done.what += f", {question} {said}"
                if said.get("error") == "WouldBlock":
                    break
                if pieces and "error" not in said and self.draw.random() < 0.3:  # a fork does not end the answer
                    talker.do(do="fork")
                    rest = talker.do(do="rest")
                    said["text"] += rest.get("text", "")
                    done.what += f", forked, and then {rest}"
                    if deadline is None and not rest.get("is_full", True) and not said["text"].endswith('"'):
                        raise Wrong(f"a fork ended the answer of its parent: {done.what}")
                if said.get("text"):
                    done.effects.append(turn(question, said["text"]))
                elif deadline is None and "error" not in said:
                    done.effects.append(turn(question, ""))
            talker.do(do="close")
        done.effects = done.effects or [nothing]
        return done

    def beside(self) -> Done:
        """Use a session while a `Chat` process talks in the file.

        A save of the session must not overwrite the chat's turns.
        """
        done = Done("beside", [nothing])
        with self.world.talker() as talker:
            if "error" in talker.do(do="open", path=self.path):
                return done
            for turn_number in range(2):
                question = self.world.question()
                said = talker.do(do="ask", text=f"{question}?", form=FORM, stop=[])
                done.what += f", {question} {said}"
                if "error" in said:
                    break
                done.effects.append(turn(question, said["text"]))
                if not turn_number:
                    body = {**self._body(self.world.question(), FORM), "session_id": self.name}
                    with suppress(httpx.HTTPError), self._client() as http:
                        done.what += f", session {http.post(CHAT, json=body).status_code}"
            talker.do(do="close")
        return done

    def killed(self) -> Done:
        """Kill a `Chat` process in the middle of an answer."""
        question = self.world.question()
        done = Done(f"{question} killed", [nothing])
        with self.world.talker() as talker:
            if "error" not in talker.do(do="open", path=self.path):
                said = talker.do(do="ask", text=f"{question}?", form=LONG_FORM, stop=[], pieces=2)
                if "error" not in said:
                    # The last token that the process read was pending.
                    done.effects = [perhaps(turn(question, Part(said["text"][:-1], 2000)))]
                done.what += f" {said}"
            talker.kill()
        return done

    def gateway_killed(self) -> Done:
        """Kill a gateway during a request of this conversation and any others."""
        gateway = self.draw.choice(self.world.gateways)
        question = self.world.question()
        body = {**self._body(question, LONG_FORM), "conversation": self.name, "stream": True}
        done = Done(f"{question} and its gateway killed", [perhaps(turn(question, Part("", 2000)))])
        with suppress(httpx.HTTPError), gateway.client() as http, http.stream("POST", CHAT, json=body) as answer:
            if answer.status_code != 200:
                done.effects = [nothing]
            next(answer.iter_lines(), None)
            gateway.kill()
        return done

    def cached(self) -> Done:
        """Use the conversation's name as a prompt's cache key, in two equal requests.

        Both answers are equal, and no conversation changes.
        """
        # The letters and the penalty make answers of the tiny model differ. The prompt is long, because short prompts
        # are not cached.
        said = " ".join("".join(self.draw.sample(string.ascii_letters, 52)) for _ in range(4))
        body: dict[str, Any] = {"messages": [{"role": "user", "content": said}], "temperature": 0}
        body |= {"prompt_cache_key": self.name, "max_tokens": 12, "repetition_penalty": 5.0}
        with suppress(httpx.HTTPError), self._client() as http:
            first, second = (http.post(CHAT, json=body) for _ in range(2))
            if first.status_code == second.status_code == 200 and content(first) != content(second):
                raise Wrong(f"a request was answered {content(first)!r}, and then {content(second)!r}")
        return Done("cached", [nothing])

    def completion(self) -> Done:
        """Name a conversation in a request for a completion, which must be refused."""
        with suppress(httpx.HTTPError), self._client() as http:
            body = {"prompt": "q0?", "max_tokens": 4, "conversation": self.name}
            status = http.post(COMPLETIONS, json=body).status_code
            if status != 400:
                raise Wrong(f"a completion with a conversation had status {status}")
        return Done("completion", [nothing])

    def several(self) -> Done:
        """Ask for two choices. The prompt is computed once, and the session gets the first choice."""
        question = self.world.question()
        body = {**self._body(question, FORM), "session_id": self.name, "n": 2}
        done = Done(f"{question} twice", [nothing])
        try:
            with self._client() as http:
                answer = http.post(CHAT, json=body)
        except httpx.HTTPError:
            done.effects = [perhaps(becomes(((question, Part("")),)))]
            return done
        if answer.status_code == 200:
            done.alone = becomes(((question, content(answer)),))
            done.effects = [perhaps(done.alone)]
        return done

    # A round

    def round(self) -> int:
        """Let some parties act concurrently, then check that the file's contents are possible. Return the number of
        actions.
        """
        if len(self.state) > MOST_TURNS or sum(len(str(answer)) for _, answer in self.state) > MOST_CHARS:
            actions: list[Callable[[], Done]] = [self.delete]
        else:
            actions = self.draw.choices(*zip(*self._weights(), strict=True), k=self.draw.choice((1, 1, 2, 3)))
        done: list[Done | BaseException] = []

        def act(action: Callable[[], Done]) -> None:
            try:
                done.append(action())
            except BaseException as error:  # noqa: BLE001 - raised by the caller
                done.append(error)

        threads = [threading.Thread(target=act, args=(action,)) for action in actions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for each in done:
            if isinstance(each, BaseException):
                raise each
        self.judge([each for each in done if isinstance(each, Done)])
        return len(actions)

    def judge(self, done: list[Done]) -> None:
        self.history = [*self.history[-6:], " | ".join(each.what for each in done)]
        if len(done) == 1 and done[0].alone is not None:
            done[0].effects = [done[0].alone]
        end_s = time.monotonic() + SETTLED_S
        while True:
            for each in done:
                if each.unless_killed is not None and each.unless_killed[0].num_kills > each.unless_killed[1]:
                    each.effects, each.unless_killed = [*each.effects, perhaps(each.unless_killed[2])], None
            last, ever = reachable(self.state, done)
            found: State = ()
            why = ""
            try:
                found = self.world.read(self.path)
            except Wrong as error:
                why = str(error)
            if not why and self._fits(found, last):
                break
            if time.monotonic() > end_s:
                raise Wrong(self._told(why or f"holds {found}", last))
            time.sleep(0.02)
        for each in done:
            for seen in each.seen:
                if not any(fits(state, seen) for state in ever):
                    raise Wrong(self._told(f"{each.what} saw {seen}", ever))
        self.state = found

    def _fits(self, found: State, last: list[State]) -> bool:
        """Return whether the file has one of these states.

        If the context is full, an answer's last token may be missing.
        """
        if any(fits(each, found) for each in last):
            return True
        shorter = [
            (*each[:-1], (each[-1][0], Part(each[-1][1][:-8], 8)))
            for each in last
            if each and isinstance(each[-1][1], str)
        ]
        return any(fits(each, found) for each in shorter) and self.world.is_full(self.path)

    def _told(self, what: str, states: list[State]) -> str:
        lines = [f"{self.name}: {what}", f"before: {self.state}", *(f"may be: {each}" for each in states[:12])]
        return "\n  ".join([*lines, *(f"did: {each}" for each in self.history)])

    def _weights(self) -> list[tuple[Callable[[], Done], float]]:
        return [
            (self.whole, 4), (self.stopped, 2), (self.streamed, 3), (self.left, 2), (self.left_unsent, 1.5),
            (self.stalled, 0.5), (self.told, 1), (self.beside, 0.5),
            (self.session, 2), (self.several, 0.5), (self.undo, 3), (self.delete, 0.5), (self.fork, 2),
            (self.export, 2), (self.chat, 5), (self.killed, 0.3), (self.gateway_killed, 0.05), (self.cached, 0.5),
            (self.completion, 0.3),
        ]  # fmt: skip

    @property
    def _quoted(self) -> str:
        return quote(self.name, safe="")

    def _client(self) -> httpx.Client:
        return self.draw.choice(self.world.gateways).client()

    @staticmethod
    def _body(question: str, form: str) -> dict[str, Any]:
        schema = {"type": "string", "pattern": f"^{form[1:-1]}$"}
        form_of = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        return {"messages": asked(question), "response_format": form_of}

    def _posted(
        self, what: str, question: str, body: dict[str, Any], effect: Callable[[str, str | Part], Effect] = turn
    ) -> Done:
        done = Done(f"{question} {what}", [nothing])
        try:
            with self._client() as http:
                answer = http.post(CHAT, json=body)
        except httpx.HTTPError:
            done.effects = [perhaps(effect(question, Part("", 2000)))]
            return done
        done.what += f" {answer.status_code}"
        if answer.status_code == 200:
            done.effects = [effect(question, content(answer))]
        elif answer.status_code != 409 and not self._had_no_room(answer):
            raise Wrong(f"{done.what}: {answer.text}")
        return done

    @staticmethod
    def _had_no_room(answer: httpx.Response) -> bool:
        return answer.status_code == 400 and "beyond the model's context" in answer.text

    def _streamed(
        self, what: str, question: str, body: dict[str, Any], pieces: int | None, stall: tuple[int, float] | None = None
    ) -> Done:
        done, text, number, is_whole = Done(f"{question} {what}", [nothing]), "", 0, False
        try:
            with self._client() as http, http.stream("POST", CHAT, json=body) as answer:
                done.what += f" {answer.status_code}"
                if answer.status_code == 409:
                    return done
                if answer.status_code != 200:
                    answer.read()
                    if self._had_no_room(answer):
                        return done
                    raise Wrong(f"{done.what}: {answer.text}")
                for line in answer.iter_lines():
                    is_whole = is_whole or line == "data: [DONE]"
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise Wrong(f"{done.what}: {line}")
                    for choice in event["choices"]:
                        text += choice["delta"].get("content") or ""
                    number += 1
                    if number == pieces:
                        break
                    if stall is not None and number == stall[0]:
                        time.sleep(stall[1])
        except httpx.HTTPError:
            pass
        # The file has little more than the text that a client read before it disconnected. A killed gateway may have
        # written the whole answer; the last token that it sent was pending.
        rest = Part(text) if number == pieces else Part(text[:-8], 2000)
        done.effects = [turn(question, text) if is_whole else perhaps(turn(question, rest))]
        done.what += f" {text[:40]}"
        return done

    def _did(self, what: str, do: Callable[[httpx.Client], httpx.Response], effect: Effect, refused: Effect) -> Done:
        done = Done(what, [perhaps(effect)])
        with suppress(httpx.HTTPError), self._client() as http:
            answer = do(http)
            done.what += f" {answer.status_code}"
            done.effects = [{200: effect, 409: nothing}.get(answer.status_code, refused)]
            if answer.status_code >= 500:
                raise Wrong(f"{done.what}: {answer.text}")
        return done


def asked(question: str) -> list[dict[str, str]]:
    """Return the messages of a question. `s1+q2` has a system message in front."""
    system, _, question = question.rpartition("+")
    user = {"role": "user", "content": f"{question}?"}
    return [{"role": "system", "content": system}, user] if system else [user]


def messages(question: str, answer: str | Part) -> list[dict[str, str]]:
    return [*asked(question), {"role": "assistant", "content": str(answer)}]


def content(answer: httpx.Response) -> str:
    return str(answer.json()["choices"][0]["message"]["content"] or "")


def moved(world: World, draw: random.Random) -> None:
    """Move a new conversation's file while its first turn runs. Another program takes the file's name."""
    name = f"moved-{world.question()}"
    place, away = world.sessions / f"{name}.kv", world.sessions / f"{name}-away.kv"
    conversation = Conversation(world, name, draw)
    question = world.question()
    body = {**conversation._body(question, LONG_FORM), "conversation": name}  # noqa: SLF001
    mine = list[int]()

    other = world.sessions / f".{name}.kv"
    with sym.kv_create(str(other)) as kv:
        sym.kv_write(kv, sym.tokenize("another program's"))

    def move() -> None:
        place.rename(away)
        other.rename(place)  # a complete file: the gateway may open it and append to it
        mine.extend(sym.tokenize("another program's"))

    def streamed() -> str:
        sent = ""
        stream = conversation._client()  # noqa: SLF001
        with stream, suppress(httpx.HTTPError), stream.stream("POST", CHAT, json={**body, "stream": True}) as answer:
            if place.exists():  # otherwise its gateway was killed
                move()
            for line in itertools.islice(answer.iter_lines(), draw.randrange(0, 6)):
                if line.startswith("data: {"):
                    sent += "".join(each["delta"].get("content") or "" for each in json.loads(line[6:])["choices"])
        return sent

    def unsent() -> str:
        """Disconnect before the answer was sent. The conversation then has not begun, and is removed."""
        sent = list[str]()

        def ask() -> None:
            with suppress(httpx.HTTPError), conversation._client() as http:  # noqa: SLF001
                answer = http.post(CHAT, json=body, timeout=draw.choice((0.05, 0.1, 0.2)))
                sent.extend([content(answer)] if answer.status_code == 200 else [])

        asking = threading.Thread(target=ask)
        asking.start()
        while asking.is_alive() and not mine:
            with suppress(FileNotFoundError):
                move()
        asking.join()
        return "".join(sent)

    text = draw.choice((streamed, unsent))()
    found = world.read(str(away))  # waits for the end of the turn
    if found and not fits(((question, Part(text, 2000)),), found):
        raise Wrong(f"{name}: was moved, and holds {found}; sent was {text!r}")
    if mine and (not place.exists() or sym.kv_read(str(place))[0][: len(mine)] != mine):
        raise Wrong(f"{name}: another program's file is not what it was")
    for path in (place, away, other):
        path.unlink(missing_ok=True)


def full(world: World, draw: random.Random) -> None:
    """Talk in a directory with a small quota. If an answer fills the quota, the file keeps the part that was read."""
    directory = world.daemons.mount / f"full-{world.question()}"
    directory.mkdir()
    os.setxattr(directory, "user.kv.quota", str(draw.choice((2, 3, 5)) * (1 << 18)).encode())
    path, question = str(directory / "a.kv"), world.question()
    expected: State = ()
    with world.talker() as talker:
        talker.do(do="open", path=path)
        said = talker.do(do="ask", text=f"{question}?", form=LONG_FORM, stop=[])
        talker.do(do="close")
    if said.get("text"):
        expected = ((question, Part(said["text"], 0)),)
        lost = ((question, Part(said["text"][:-40], 40)),)  # pending tokens had no room
        found = world.read(path)
        if not fits(expected, found) and not fits(lost, found):
            raise Wrong(f"{path}: filled its quota, was read as {said}, and holds {found}")
    (directory / "a.kv").unlink(missing_ok=True)
    directory.rmdir()


def small(world: World, draw: random.Random) -> None:
    """Talk with a key that has a small quota and a time limit on answers. The file has exactly the text sent."""
    name, did = f"small-{world.question()}", list[str]()
    said: State = ()
    states: list[State] = [()]
    path = world.sessions.parent.parent / "small/sessions" / f"{name}.kv"
    conversation = Conversation(world, name, draw)
    with world.small.client() as http:
        for _ in range(draw.randrange(1, 5)):
            question, kind = world.question(), draw.choice(("whole", "streamed", "several"))
            body = conversation._body(question, draw.choice((FORM, LONG_FORM, LONG_FORM)))  # noqa: SLF001
            if kind == "several":
                before = [message for each in said for message in messages(*each)]
                body |= {"messages": before + body["messages"], "n": 4, "session_id": name}
            else:
                body |= {"conversation": name, "stream": kind == "streamed"}
            with http.stream("POST", CHAT, json=body) as answer:
                text = answer.read().decode()
            events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
            did.append(f"{question} {kind} {answer.status_code} {text[-300:]}")
            if answer.status_code != 200:
                if answer.status_code not in {403, 429, 503, 507}:
                    raise Wrong(f"{name}: {did}")
                continue
            choices = [each for event in events for each in event.get("choices", [])]
            sent = "".join(each["delta"].get("content") or "" for each in choices) if events else content(answer)
            # If an answer fills the quota, its last tokens have no room, perhaps not even in a session's copy.
            ends: list[tuple[str, str | Part]] = [(question, sent), (question, Part(sent[:-40], 40))]
            if kind == "several":
                states += [(*said, end) for end in ends]
            else:
                states = [(*state, end) for state in states for end in ends]
            said = (*said, ends[0])
        found = world.read(str(path))
        if not any(fits(each, found) for each in states):
            raise Wrong(f"{name}: holds {found}, expected was one of {states}; {did}")
        http.delete(f"/sessions/{name}")


def handbook(world: World, draw: random.Random) -> None:
    """Talk in a file that begins with other text. An undo removes turns, and never that text."""
    name = f"handbook-{world.question()}"
    conversation = Conversation(world, name, draw)
    with sym.kv_create(conversation.path) as kv:
        sym.kv_write(kv, book := sym.tokenize("A refund is possible within thirty days. " * 4))
    with suppress(httpx.HTTPError), conversation._client() as http:  # noqa: SLF001
        lengths = []
        for _ in range(draw.randrange(0, 3)):
            lengths.append(len(sym.kv_read(conversation.path)[0]))
            body = conversation._body(question := world.question(), FORM)  # noqa: SLF001
            body["messages"] = [*messages(question, "yes"), *body["messages"]]
            http.post(CHAT, json={**body, "conversation": name}).raise_for_status()
        for length in reversed(lengths):
            http.post(f"/sessions/{name}/undo").raise_for_status()
            if (left := len(sym.kv_read(conversation.path)[0])) != length:
                raise Wrong(f"{name}: {left} tokens after an undo, and {length} before the turn")
        status = http.post(f"/sessions/{name}/undo").status_code
        left_over = sym.kv_read(conversation.path)[0]
        if status != 400 or left_over != book:
            raise Wrong(f"{name}: an undo without a turn had status {status}, and left {len(left_over)} tokens")
    conversation.file.unlink(missing_ok=True)


def names_of(worker: int) -> list[str]:
    """Return names that are easy to confuse."""
    return [f"{kind}{worker}" for kind in ("a b", "a-b", "a/b", "a?b", "plain")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=1e9, help="end after so many seconds")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--restart-every", type=int, default=3000, metavar="N", help="operations between restarts")
    parser.add_argument("--quick", action="store_true", help="some seconds of it")
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        client()
        return 0
    if options.quick:
        options.operations, options.restart_every = 70, 40
    with tempfile.TemporaryDirectory(prefix="conversations-") as place:
        return run(Path(place), options)


def run(base: Path, options: argparse.Namespace) -> int:
    draw = random.Random(options.seed)
    world = World(base, draw)
    began_s, num_done, num_restarts, wrong = time.monotonic(), 0, 0, list[BaseException]()
    lock = threading.Lock()

    def work(number: int) -> None:
        nonlocal num_done, num_restarts
        own = random.Random(options.seed * 1000 + number)
        conversations = [Conversation(world, name, own) for name in names_of(number)]
        try:
            while not wrong and num_done < options.operations and time.monotonic() - began_s < options.seconds:
                with world.going():
                    count, kind = 1, own.random()
                    if kind < 0.03:
                        moved(world, own)
                    elif kind < 0.06:
                        full(world, own)
                    elif kind < 0.12:
                        small(world, own)
                    elif kind < 0.14:
                        handbook(world, own)
                    else:
                        count = own.choice(conversations).round()
                with lock:
                    num_done += count
                if number == 0 and not wrong and num_done >= (num_restarts + 1) * options.restart_every:
                    num_restarts += 1
                    world.restart()
                    print(f"{num_done} operations in {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)
        except BaseException as error:  # noqa: BLE001 - reported at the end
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(options.workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took_s = time.monotonic() - began_s
    world.end()
    world.daemons.close()
    log = world.daemons.log.read_text()
    for error in wrong[:1]:
        if not isinstance(error, Wrong):
            raise error
        print(f"WRONG after {num_done} operations, {took_s:.0f} s, seed {options.seed}: {error}")
        print(log[-4000:])
        return 1
    print(
        f"{num_done} operations, {num_restarts} restarts in {took_s:.0f} s, seed {options.seed}: "
        "all conversations hold what was sent"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
