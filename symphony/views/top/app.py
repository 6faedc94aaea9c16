"""The screen of `symphony top`, and what it has in common with the screen of a fleet."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from textual import on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widget import Widget
from textual.widgets import DataTable, Footer, Input, Static

from symphony.launcher.asking.listing import printable
from symphony.views.rates import Rates
from symphony.views.top.columns import FileRow, ProgramRow, file_columns, program_columns, short_id
from symphony.views.top.listing import Listing
from symphony.views.top.overview import Overview
from symphony.views.top.questions import Confirm, Keys
from symphony.views.top.sampling import Daemon, Done, Gone, Sample, Sampling, program_rows

WINDOW_S = 10.0
"""Time that quantiles cover. Quantiles of a single interval would fluctuate."""
INTERVALS_S = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
LATE_S = 2.0
"""Delay of a sample after which the screen says that the daemon does not answer."""


class Asking(Protocol):
    """Protocol of a thread that takes samples, and carries out the user's actions."""

    interval_s: float

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def ask(self, action: Callable[[Any], str]) -> None: ...


class Told(Message):
    """Message with news from the thread that takes samples."""

    def __init__(self, news: Any) -> None:
        super().__init__()
        self.news = news


class Tables(App[None]):
    """App with a table of programs, a second table, and lines above both."""

    TITLE = "symphony top"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("h,question_mark", "keys", "Help"),
        Binding("tab", "other", "Switch", priority=True),
        Binding("s", "sort(1)", "Sort"),
        Binding("S", "sort(-1)", show=False),
        Binding("r", "turn", "Reverse"),
        Binding("slash", "filter", "Filter"),
        Binding("k", "kill('TERM')", "Kill"),
        Binding("K", "kill('KILL')", show=False),
        Binding("space", "pause", "Pause"),
        Binding("plus,equals_sign", "pace(-1)", show=False),
        Binding("minus", "pace(1)", show=False),
        Binding("escape", "all", show=False),
    ]
    CSS = """
    Screen { layers: base; }
    #banner { height: 1; background: $error; color: $text; display: none; padding: 0 1; }
    #banner.-shown { display: block; }
    Overview { height: 8; padding: 0 1; }
    Overview > Static { height: 1; }
    Curve { height: 1; }
    Curve > .now { width: 44; height: 1; }
    Curve > Sparkline { width: 1fr; height: 1; margin-left: 1; }
    .-tall Overview { height: 9; padding: 0 1 1 1; }
    Listing { height: 1fr; border: round $panel; border-title-color: $text-muted; scrollbar-size-horizontal: 0; }
    Listing:focus { border: round $accent; border-title-color: $text; }
    .-short Listing, .-tiny Listing { display: none; }
    .-short Listing.-front, .-tiny Listing.-front { display: block; }
    .-tiny Overview { display: none; }
    #filter { display: none; border: none; height: 1; padding: 0 1; background: $boost; }
    #filter.-shown { display: block; }
    ModalScreen { align: center middle; }
    .dialog { width: auto; max-width: 90%; height: auto; padding: 1 2; border: round $accent; background: $panel; }
    .dialog Static { width: auto; }
    .dim { color: $text-muted; margin-top: 1; }
    """

    def __init__(self, sampling: Asking, above: Widget, second: Listing[Any]) -> None:
        super().__init__()
        self.VERTICAL_BREAKPOINTS = [(0, "-tiny"), (16, "-short"), (34, "-tall")]
        self._sampling, self._above, self._second = sampling, above, second
        self._programs = Listing[ProgramRow]("programs", program_columns(), "TOK/S", id="programs", classes="-front")
        self._taken_s = 0.0
        """Time of the sample that is shown. 0: none is."""
        self._is_paused = False
        self._gone = ""

    def compose(self) -> ComposeResult:
        yield Static(id="banner", markup=False)
        yield self._above
        yield self._programs
        yield self._second
        yield Input(placeholder="words that a row has to have", id="filter", select_on_focus=False)
        yield Footer(compact=True, show_command_palette=False)

    def show(self, sample: Any) -> None:
        """Show a sample."""
        raise NotImplementedError

    def clear(self) -> None:
        """Clear the lines above the tables, and forget earlier samples."""
        raise NotImplementedError

    def on_mount(self) -> None:
        self.clear()
        self._programs.focus()
        self._say("")
        self.set_interval(1.0, self._look_at_the_time)
        self._sampling.start()

    def on_unmount(self) -> None:
        self._sampling.stop()

    @property
    def _front(self) -> Listing[Any]:
        return self._second if self._second.has_class("-front") else self._programs

    # News from the sampling thread

    def tell(self, news: Any) -> None:
        """Pass news to the app. Runs on the thread that takes samples."""
        self.post_message(Told(news))

    @on(Told)
    def take(self, told: Told) -> None:
        news = told.news
        if self._is_leaving:
            return
        if isinstance(news, Done):
            self.notify(printable(news.text), severity="error" if news.failed else "information", markup=False)
        elif isinstance(news, Gone):
            self._forget(f"{printable(news.why)}: trying again")
        elif not self._is_paused:
            self._gone = ""
            self._say("")
            self._taken_s = news.taken_s
            self.show(news)

    @property
    def _is_leaving(self) -> bool:
        """Whether the widgets are removed already. Messages may still arrive then."""
        return not self.query("#banner")

    def _forget(self, why: str) -> None:
        """Clear the screen, since its facts are stale. `why`: text for the banner."""
        self._taken_s = 0.0
        self._programs.show([])
        self._second.show([])
        self.clear()
        self._gone = why
        self._say(why)

    def _look_at_the_time(self) -> None:
        """Show in the banner that the daemon has not answered for long. A daemon that hangs causes no error."""
        if self._gone or self._is_paused or not self._taken_s or self._is_leaving:
            return
        late_s = time.monotonic() - self._taken_s - self._sampling.interval_s
        if late_s > LATE_S:
            self._say(f"the daemon has not answered for {late_s:.0f} s")

    def _say(self, words: str) -> None:
        banner = self.query_one("#banner", Static)
        banner.set_class(bool(words), "-shown")
        banner.update(words)

    # Keys

    def action_other(self) -> None:
        """Switch to the other table."""
        if isinstance(self.screen, (Confirm, Keys)):
            return
        for table in (self._programs, self._second):
            table.toggle_class("-front")
        self.leave_filter()

    def action_sort(self, step: int) -> None:
        self._front.sort_by_next(step)

    def action_turn(self) -> None:
        self._front.turn()

    @on(DataTable.HeaderSelected)
    def sort_by_head(self, event: DataTable.HeaderSelected) -> None:
        name = event.column_key.value
        if isinstance(event.data_table, Listing) and name is not None:
            event.data_table.sort_by(name)

    def action_filter(self) -> None:
        field = self.query_one("#filter", Input)
        field.value = self._front.words
        field.add_class("-shown")
        field.focus()

    @on(Input.Changed, "#filter")
    def filter_now(self, event: Input.Changed) -> None:
        if event.input.has_class("-shown"):
            self._front.words = event.value

    @on(Input.Submitted, "#filter")
    def leave_filter(self) -> None:
        self.query_one("#filter", Input).remove_class("-shown")
        self._front.focus()

    def action_all(self) -> None:
        """Remove the filter."""
        self.leave_filter()
        self._front.words = ""

    def action_kill(self, name: str) -> None:
        row = self._programs.selected
        if self._front is not self._programs or row is None:
            self.notify("choose a program: Tab leads to the programs", severity="warning")
            return
        program, number = row.program, signal.Signals[f"SIG{name}"]

        def answered(yes: bool | None) -> None:
            if yes:
                self._sampling.ask(lambda daemon: daemon.kill(program, number, name))

        question = (
            f"Send {name} to all processes of {printable(program.name)} (pid {program.pid}, id {short_id(program)})?"
        )
        self.push_screen(Confirm(question), answered)

    def action_pause(self) -> None:
        self._is_paused = not self._is_paused
        self._say("paused: Space goes on" if self._is_paused else self._gone)

    def action_pace(self, step: int) -> None:
        """Change to the next longer or shorter interval."""
        slower, faster = (
            [each for each in INTERVALS_S if each > self._sampling.interval_s],
            [each for each in INTERVALS_S if each < self._sampling.interval_s],
        )
        found = slower[:1] if step > 0 else faster[-1:]
        if found:
            self._sampling.interval_s = found[0]
            self.notify(f"every {found[0]:g} s")

    def action_keys(self) -> None:
        self.push_screen(Keys())


class Top(Tables):
    """The app: tables of one daemon's programs and files, below an overview."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("p", "pin", "Pin")]

    def __init__(self, daemon: Daemon, interval_s: float) -> None:
        self._samples: deque[Sample] = deque()
        self._overview = Overview()
        self._files = Listing[FileRow]("files by use", file_columns(0), "HEAT", id="files")
        super().__init__(Sampling(daemon, interval_s, self.tell), self._overview, self._files)

    def show(self, sample: Sample) -> None:
        before = self._samples[-1] if self._samples else None
        if before is not None and before.info["pid"] != sample.info["pid"]:
            self.clear()
            before = None
        self._samples.append(sample)
        while len(self._samples) > 2 and self._samples[1].taken_s <= sample.taken_s - WINDOW_S:
            self._samples.popleft()
        rates = None if before is None else Rates.between(before.info, sample.info)
        if rates is not None:
            lately = Rates.between(self._samples[0].info, sample.info) or rates
            rates = rates.with_times_of(lately)
        self._overview.show(sample, rates)
        self._programs.show(program_rows(before, sample))
        self._files.show([FileRow(each) for each in sample.files], file_columns(sample.info["page_bytes"]))

    def clear(self) -> None:
        self._samples.clear()
        self._overview.reset()

    def action_pin(self) -> None:
        row = self._files.selected
        if self._front is not self._files or row is None:
            self.notify("choose a file: Tab leads to the files", severity="warning")
            return
        file = row.file
        self._sampling.ask(lambda daemon: daemon.pin(file))
