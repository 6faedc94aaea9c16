"""Completes in an editor, and knows what will be needed: the state that Ctrl-Z brings back, not a file that is deleted.

Each state of a file is a fork of the one before, cut to what they have in common. So undoing computes nothing. A file
that is left for long needs no memory: what could be undone there goes, and its text's KV is cold.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from work import Answer, give, take

import libsym as sym

MAX_UNDO = 20
COLD_AFTER = 20
"""Events without a file until it is taken for one that is left."""


@dataclass
class State:
    """A text, and the file that has all of it but the last token, with which a completion begins."""

    text: list[int]
    kv: sym.KV


class Document:
    """One file of the editor: its states, the last of which is on the screen."""

    def __init__(self) -> None:
        self._states: list[State] = []
        self.num_computed = 0
        self.used_at = 0

    def show(self, text: list[int]) -> State:
        for place in reversed(range(len(self._states))):  # undone: the states after it are gone
            if self._states[place].text == text:
                self._drop(self._states[place + 1 :])
                del self._states[place + 1 :]
                return self._states[-1]
        kv, num_common = self._fork(text)
        if text[num_common:-1]:
            sym.kv_write(kv, text[num_common:-1])
        self.num_computed += len(text) - 1 - num_common
        self._states.append(State(text, kv))
        self._drop(self._states[:-MAX_UNDO])
        del self._states[:-MAX_UNDO]
        return self._states[-1]

    def _fork(self, text: list[int]) -> tuple[sym.KV, int]:
        if not self._states:
            return sym.kv_create(), 0
        last = self._states[-1]
        num_common = common(last.text[:-1], text[:-1])
        kv = sym.kv_fork(last.kv)
        sym.kv_truncate(kv, num_common)
        return kv, num_common

    def forget(self) -> None:
        self._drop(self._states)
        self._states.clear()

    def leave(self) -> None:
        """Its last state is where there is room, until it is shown again."""
        self._drop(self._states[:-1])
        del self._states[:-1]
        sym.kv_advise(self._states[0].kv, sym.COLD)

    @staticmethod
    def _drop(states: list[State]) -> None:
        for state in states:
            state.kv.close()


def common(one: list[int], other: list[int]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (left, right) in pairs if left != right), min(len(one), len(other)))


def complete(state: State, num_tokens: int) -> tuple[list[int], list[float]]:
    """On a fork: what is suggested is not in the file."""
    tokens, came_s = [], []
    with sym.kv_fork(state.kv) as kv:
        for token in sym.generate(kv, state.text[-1:], max_tokens=num_tokens, stop_at_end=False):
            tokens.append(token)
            came_s.append(time.monotonic())
    return tokens, came_s


def main() -> None:
    sym.connect()
    work = take()
    answers: list[Answer] = []
    documents: dict[int, Document] = {}
    entry_bytes, before_bytes = sym.model_info().entry_bytes, sym.daemon_stat()["used_bytes"]
    for now, event in enumerate(work["events"]):
        if event["text"] is None:
            documents.pop(event["file"]).forget()
            continue
        asked_s = time.monotonic()
        document = documents.setdefault(event["file"], Document())
        document.used_at, before = now, document.num_computed
        state = document.show(event["text"])
        tokens, came_s = complete(state, work["num_tokens"])
        for other in documents.values():
            if now - other.used_at == COLD_AFTER:
                other.leave()
        answer = Answer(tokens=tokens, asked_s=asked_s, came_s=came_s, label=event["what"])
        answer["computed"] = document.num_computed - before + 1
        answer["held"] = (sym.daemon_stat()["used_bytes"] - before_bytes) // entry_bytes
        answers.append(answer)
    give(answers)


main()
