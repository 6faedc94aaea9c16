"""The dialogs of `symphony top`: a question before an action, and the help page on keys."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Static

KEYS = """\
Tab        the other table
s  S       sort by the next or the previous column; or click a heading
r          reverse the order of the rows
/          show only rows with these words; Esc: all of them
k  K       end a program by TERM, by KILL
p          pin a file, or unpin it
Space      stop, and go on
+  -       look more often, less often
q          leave

calls      times of calls of pred() and of tokens of generate(), from
           the request to the result; 1 of 100 took longer than p99
waits      the part of these times in which no step computed the call
WAIT       share of the time in which the program's calls waited
HEAT       share of the last minutes in which the file was used
OWN        space that removing the file would free"""


class Confirm(ModalScreen[bool]):
    """Dialog that asks a yes-or-no question."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("y,enter", "answer(True)", "yes"),
        ("n,escape,q", "answer(False)", "no"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(self._question, markup=False)
            yield Static("y: yes   n: no", classes="dim", markup=False)

    def action_answer(self, answer: bool) -> None:
        self.dismiss(answer)


class Keys(ModalScreen[None]):
    """Help page on keys. A key closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape,q,enter,h,question_mark,space", "dismiss", "back")]

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(KEYS, markup=False)
