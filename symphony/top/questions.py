"""What is asked before something is done, and the page that says which keys there are."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Static

KEYS = """\
Tab        the other table: programs, files
s  S       sort by the next column, by the one before; or click its head
r          the other way round
/          show only rows with these words; Esc: all of them
k  K       end a program by TERM, by KILL
p          pin a file, or unpin it
Space      stop, and go on
+  -       look more often, less often
q          leave

calls      of pred(), and tokens of generate(): from when one was asked
           for until it was computed; 1 of 100 took longer than p99
waits      what of that they were in no step
WAIT       how much of the time calls of a program were in no step
HEAT       how much of the last minutes a file was used in
OWN        what removing the file would free"""


class Confirm(ModalScreen[bool]):
    """Yes or no; whatever is not yes is no."""

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
    """Until any of these is pressed."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape,q,enter,h,question_mark,space", "dismiss", "back")]

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(KEYS, markup=False)
