"""Model of the states that a crash may leave. After a crash, a file has one of its states since its last sync, whole or
cut.

A client has a directory of its own, so it knows the effect of each of its operations. The client logs each operation
before its begin (`begin`) and after its end (`end`). The check after the crash replays this log.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

KV, PLAIN = "kv", "plain"

Content = tuple[int, ...]
"""Tokens of a KV file, or bytes of a plain file."""


@dataclass(frozen=True, slots=True)
class State:
    """A state of a file: contents that the file had, or would have got by an operation under way."""

    kind: str
    content: Content = ()
    is_open: bool = False
    """Whether unknown contents may follow `content`, because a generation was running."""

    def may_be(self, seen: State) -> bool:
        """Return whether `seen` is this state, or a prefix of it."""
        size = len(self.content)
        if seen.kind != self.kind:
            return False
        if self.is_open and len(seen.content) > size:
            return seen.content[:size] == self.content
        return seen.content == self.content[: len(seen.content)]


@dataclass(slots=True, eq=False)
class File:
    """File with all its states since its last sync."""

    states: list[State]
    num_forgotten: int = 0
    """Number of earlier states that were dropped."""
    is_kept: bool = False
    """Whether the file was synced and not removed since."""

    @property
    def now(self) -> State:
        return self.states[-1]

    @property
    def place(self) -> int:
        """Serial number of the present state among all states of the file, counted from 0."""
        return self.num_forgotten + len(self.states) - 1

    def pin(self) -> None:
        """Note that the file was synced: only the present state is possible now."""
        self.num_forgotten = self.place
        self.states = [self.now]
        self.is_kept = True

    def may_be(self, seen: State, since: int) -> bool:
        """Return whether `seen` may be found under a name that the file got in the state with serial number `since`.

        `seen` must be at least as long as the shortest of the file's states since then.
        """
        states = [each for each in self.states[max(0, since - self.num_forgotten) :] if each.kind == seen.kind]
        fewest = min((len(each.content) for each in states), default=0)
        return len(seen.content) >= fewest and any(each.may_be(seen) for each in states)


@dataclass(frozen=True, slots=True)
class Named:
    """File that a name points to, and the serial number of the file's state when the file got the name."""

    file: File
    since: int


@dataclass(slots=True)
class Directory:
    """Model of one client's directory."""

    names: dict[str, list[Named | None]] = field(default_factory=dict)
    """Possible files of each name, oldest first. The oldest entry was once the only possibility. None: the name has no
    file.
    """

    @classmethod
    def found(cls, seen: dict[str, State]) -> Directory:
        """Return the model of a directory as found after a start, when all its contents are on disk."""
        return cls({name: [Named(File([state], is_kept=True), 0)] for name, state in seen.items()})

    def file(self, name: str) -> File | None:
        named = self.names.get(name, [None])[-1]
        return None if named is None else named.file

    def existing(self, kind: str) -> list[str]:
        return [name for name in self.names if (file := self.file(name)) is not None and file.now.kind == kind]

    # Operations

    def begin(self, what: str, name: str, value: Any = None) -> None:
        """Note that an operation begins. Its effect is possible from now on."""
        file = self.file(name)
        if what == "create":
            self._put(name, File([State(KV)]))
        elif what == "write":
            self._put(name, File([State(PLAIN), State(PLAIN, tuple(value))]))
        elif what == "import":
            image, tokens = value
            self._put(name, File([State(PLAIN), State(PLAIN, tuple(image)), State(KV, tuple(tokens))]))
        elif what == "fork":
            assert file is not None
            self._put(value, File([State(KV, file.now.content)]))
        elif what == "rename" and file is not None:
            self._lose(value)
            # The new name of a KV file becomes durable only together with all entries that the file has now.
            self._put(value, file, file.place if file.now.kind == KV else 0)
            self.names[name].append(None)
        elif what == "remove":
            self._lose(name)
            self.names[name].append(None)
        elif file is not None and what in {"append", "generate"}:
            content = (*file.now.content, *value)
            file.states.append(State(file.now.kind, content, is_open=what == "generate"))
        elif what == "truncate" and file is not None:
            file.states.append(State(file.now.kind, file.now.content[:value]))

    def end(self, what: str, name: str, result: Any = None) -> None:
        """Note that an operation has ended."""
        file = self.file(name)
        if what == "generate" and file is not None:
            file.states[-1] = State(KV, tuple(result))
        elif what == "sync" and file is not None:
            self._pin(file)
        elif what == "sync all":
            for each in {file for name in self.names if (file := self.file(name)) is not None}:
                self._pin(each)
            self.names = {name: led[-1:] for name, led in self.names.items()}

    def _put(self, name: str, file: File, since: int = 0) -> None:
        self.names.setdefault(name, [None]).append(Named(file, since))

    def _lose(self, name: str) -> None:
        file = self.file(name)
        if file is not None:
            file.is_kept = False

    def _pin(self, file: File) -> None:
        file.pin()
        for name, led in self.names.items():
            places = [place for place, named in enumerate(led) if named is not None and named.file is file]
            if places and led[-1] is not None and led[-1].file is file:
                self.names[name] = led[-1:]
            elif places:
                self.names[name] = led[places[-1] + 1 :]  # here the file has lost this name

    # After a crash

    def wrong(self, seen: dict[str, State]) -> list[str]:
        """Return messages about the names in the directory whose files are in no possible state."""
        found = []
        for name in {*seen, *self.names}:
            led = self.names.get(name, [None])
            state = seen.get(name)
            if state is None:
                if None not in led:
                    found.append(f"{name} is gone: {_shown(led)}")
            elif not any(named is not None and named.file.may_be(state, named.since) for named in led):
                found.append(f"{name} is {_shown_state(state)}: {_shown(led)}")
        files = {named.file for led in self.names.values() for named in led if named is not None}
        for file in files:
            called = {name for name, led in self.names.items() for named in led if named and named.file is file}
            if file.is_kept and not any(name in seen and file.may_be(seen[name], 0) for name in called):
                found.append(f"a synced file is lost: it was called {sorted(called)}")
        return found


def _shown(led: list[Named | None]) -> str:
    each = ["nothing" if named is None else ", ".join(map(_shown_state, named.file.states)) for named in led]
    return "it was " + "; then ".join(each)


def _shown_state(state: State) -> str:
    more = " or more" if state.is_open else ""
    return f"{state.kind} of {len(state.content)}{more} ({hash(state.content) & 0xFFFF:x})"
