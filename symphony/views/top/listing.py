"""Table whose rows are replaced at each sample. The table sorts and filters rows, and keeps the cursor on its row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from rich.text import Text
from textual.events import Resize
from textual.widgets import DataTable

from symphony.views.top.columns import PADDING, Column, cell, fitting

MAX_ROWS = 500
"""Upper bound of the rows that are shown. More rows are useless on a screen, and take a tenth of a second to draw."""


class ShownRow(Protocol):
    """Protocol of a table's row: its identity, and the text that a filter searches."""

    @property
    def id(self) -> str: ...

    @property
    def words(self) -> str: ...


Row = TypeVar("Row", bound=ShownRow)


class Listing(DataTable[Text], Generic[Row]):
    """Table of the rows that `show` got last."""

    def __init__(self, what: str, columns: Sequence[Column[Row]], sort_by: str, **how: Any) -> None:
        super().__init__(cursor_type="row", cell_padding=PADDING, zebra_stripes=True, **how)
        self._what = what
        self._all = list(columns)
        self._names = [each.name for each in columns]
        self._sort_by = sort_by
        self._is_reversed = False
        self._filter = ""
        self._rows: Sequence[Row] = ()
        self._shown: list[Row] = []

    # Rows

    @property
    def selected(self) -> Row | None:
        """The row under the cursor."""
        return self._shown[self.cursor_row] if 0 <= self.cursor_row < len(self._shown) else None

    @property
    def shown(self) -> list[Row]:
        return list(self._shown)

    def show(self, rows: Sequence[Row], columns: Sequence[Column[Row]] | None = None) -> None:
        self._rows = rows
        self._all = list(columns or self._all)
        self._draw()

    def sort_by(self, name: str) -> None:
        """Sort by a column. If the rows are sorted by this column already, reverse their order."""
        self._is_reversed = name == self._sort_by and not self._is_reversed
        self._sort_by = name
        self._draw()

    def sort_by_next(self, step: int) -> None:
        """Sort by the visible column that is `step` columns to the right of the present sort column."""
        names = [each.name for each in self._columns_now()]
        at = names.index(self._sort_by) if self._sort_by in names else 0
        self._is_reversed = False
        self._sort_by = names[(at + step) % len(names)]
        self._draw()

    def turn(self) -> None:
        """Reverse the order of the rows."""
        self._is_reversed = not self._is_reversed
        self._draw()

    @property
    def words(self) -> str:
        return self._filter

    @words.setter
    def words(self, text: str) -> None:
        """Show only rows that have all of these words."""
        self._filter = text
        self._draw()

    # Drawing

    def on_resize(self, _event: Resize) -> None:
        self._draw()

    def _columns_now(self) -> list[Column[Row]]:
        return fitting(self._all, self.size.width - self.scrollbar_size_vertical)

    def _sorted(self) -> list[Row]:
        words = self._filter.lower().split()
        found = [row for row in self._rows if all(word in row.words.lower() for word in words)]
        column = next(each for each in self._all if each.name == self._sort_by)
        key: Callable[[Row], Any] = column.key
        found.sort(key=lambda row: row.id)
        found.sort(key=key, reverse=self._is_reversed == column.is_text)
        return found[:MAX_ROWS]

    def _draw(self) -> None:
        before, top = self.selected, self.scroll_y
        self._shown = self._sorted()
        if not self.is_mounted or not self.size.width:
            return  # a resize event follows once the table has a size: it draws the rows
        with self.app.batch_update():
            self.clear(columns=True)
            columns = self._columns_now()
            for each in columns:
                self.add_column(self._heading(each), width=each.width, key=each.name)
            for row in self._shown:
                self.add_row(*(_cell(each, row) for each in columns), key=row.id)
            ids = [row.id for row in self._shown]
            at = ids.index(before.id) if before is not None and before.id in ids else self.cursor_row
            self.move_cursor(row=max(0, min(at, len(ids) - 1)), scroll=False)
            self.scroll_to(y=top, animate=False)
        all_of_them = f"{len(self._shown)}" if not self._filter else f"{len(self._shown)} of {len(self._rows)}"
        self.border_title = f"{self._what}: {all_of_them}" + (f", with “{cell(self._filter)}”" if self._filter else "")

    def _heading(self, column: Column[Row]) -> Text:
        if column.name != self._sort_by:
            return Text(column.name, justify="left" if column.is_text else "right")
        arrow = "▲" if self._is_reversed != column.is_text else "▼"
        return Text(f"{column.name}{arrow}", justify="left" if column.is_text else "right")


def _cell(column: Column[Row], row: Row) -> Text:
    text = cell(column.text(row))
    if len(text) > column.width:
        text = text[: column.width - 1] + "…"
    return Text(text, justify="left" if column.is_text else "right", no_wrap=True)
