"""Drawing of boxes, lines and words, in colours for a light or a dark page. Unreadable words raise errors."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

SANS = "Helvetica, Arial, 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
MONO_EM = 0.6
"""Width of a character in a monospaced font, in font sizes."""
SANS_EM = 0.58
"""Mean width of a character in the widest proportional font, in font sizes."""
MIN_CONTRAST = 4.5
"""Least contrast of words against their background, by WCAG 2, level AA."""


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours of a page, as #rrggbb."""

    name: str
    page: str
    box: str
    room: str
    line: str
    words: str
    quiet: str
    accent: str


THEMES = (
    Theme("light", "#ffffff", "#f6f8fa", "#ffffff", "#8c959f", "#1f2328", "#59636e", "#0550ae"),
    Theme("dark", "#0d1117", "#161b22", "#0d1117", "#6e7681", "#e6edf3", "#9198a1", "#79c0ff"),
)


def contrast(one: str, two: str) -> float:
    """Return the ratio of two colours' luminances, from 1 to 21."""
    dark, light = sorted((_luminance(one), _luminance(two)))
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


class Drawing:
    """Elements in the order in which they are painted. Lengths are in pixels."""

    def __init__(self, theme: Theme, width: int, height: int, title: str) -> None:
        self.theme = theme
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
            f' height="{height}" role="img">\n<title>{escape(title)}</title>'
        )
        self._elements: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, *, fill: str, radius: int = 6) -> None:
        self._elements.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}" fill="{fill}"'
            f' stroke="{self.theme.line}"/>'
        )

    def path(self, steps: str, *, fill: str = "none", colour: str = "") -> None:
        colour = colour or self.theme.line
        self._elements.append(f'<path d="{steps}" fill="{fill}" stroke="{colour}" stroke-width="1.5"/>')

    def arrow_down(self, x: float, y: float, to_y: float) -> None:
        self.path(f"M{x:g} {y:g}V{to_y - 6:g}")
        self.path(f"M{x - 4:g} {to_y - 8:g}h8l-4 7z", fill=self.theme.line)

    def words(
        self,
        x: float,
        y: float,
        text: str,
        *,
        room: float,
        on: str,
        colour: str = "",
        size: int = 13,
        mono: bool = False,
        bold: bool = False,
        centred: bool = False,
    ) -> None:
        """Add a line of text that begins at x, or has its middle at x. Its baseline is at y.

        The text must fit `room`, and must contrast with the colour `on`.
        """
        colour = colour or self.theme.words
        width = round(len(text) * size * (MONO_EM if mono else SANS_EM), 2)
        assert width <= room, f"{text!r} takes {width} of {room} pixels"
        assert contrast(colour, on) >= MIN_CONTRAST, f"{text!r}: {colour} on {on} can't be read"
        style = f'font-family="{MONO if mono else SANS}" font-size="{size}" fill="{colour}"'
        style += ' font-weight="600"' * bold + ' text-anchor="middle"' * centred
        if mono:  # fixes the width in any reader's font, so that columns stay aligned
            style += f' textLength="{width:g}" lengthAdjust="spacingAndGlyphs" xml:space="preserve"'
        self._elements.append(f'<text x="{x:g}" y="{y:g}" {style}>{escape(text, quote=False)}</text>')

    def __str__(self) -> str:
        return "\n".join([self._head, *self._elements, "</svg>", ""])
