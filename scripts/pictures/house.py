"""Picture of the house: a box for each package with its rooms, and an arrow for each import. The source tree is the
input.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from itertools import permutations
from pathlib import Path

from grimp import ImportGraph, build_graph
from svg import Drawing, Theme

HOUSE = Path(__file__).resolve().parents[2]
WIDTH = 840
MARGIN = 10
ROOF = 36
EAVES = 8
GAP = 26
"""Space between two boxes. An arrow has this length."""
PAD = 12
HEAD = 50
"""Height of a box without rooms: its name and its caption."""
ROOM = 22
ROOM_GAP = 8
LEGEND = ("An arrow is an import.", "A room may import rooms", "that are below it, never", "one above it.")


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a package: from x to x + width, on top of the packages named in `on`."""

    x: int
    width: int
    on: tuple[str, ...]
    caption: str


PLACES = {
    "libsym": Place(10, 820, (), "the floor: the system calls, for programs and for the daemon"),
    "triton_kernels": Place(530, 292, ("libsym",), "one kernel a file"),
    "decoder": Place(530, 292, ("triton_kernels",), "tensors, never names or users"),
    "kvfs": Place(218, 292, ("libsym",), "page numbers and bytes, never tensors"),
    "scheduler": Place(218, 604, ("kvfs", "decoder"), "system calls in, batches out"),
    "symphony": Place(218, 604, ("scheduler",), "configuration, the daemon that wires it all, the command line"),
    "lips": Place(10, 180, ("libsym",), "programs: libsym alone"),
}
"""Places of the packages, from the bottom upwards."""


@dataclass(frozen=True, slots=True)
class Box:
    """A package to draw: its place, and its rooms by level, from the highest level downwards."""

    place: Place
    top: int
    bottom: int
    levels: list[list[str]]


Graph = dict[str, set[str]]
"""Direct imports of each module."""


@cache
def packages() -> tuple[str, ...]:
    with (HOUSE / "pyproject.toml").open("rb") as settings:
        return tuple(tomllib.load(settings)["tool"]["importlinter"]["root_packages"])


@cache
def modules() -> ImportGraph:
    """Return the graph of imports. import-linter brings grimp, and checks the contracts on the same graph."""
    sys.path.insert(0, str(HOUSE))
    return build_graph(*packages(), cache_dir=None)


def imports_among(names: Iterable[str]) -> Graph:
    """Return the imports between these packages, at any depth."""
    graph: Graph = {name: set() for name in names}
    for one, other in permutations(graph, 2):
        if modules().direct_import_exists(importer=one, imported=other, as_packages=True):
            graph[one].add(other)
    return graph


def rooms_of(package: str) -> list[list[str]]:
    """Return a package's subpackages by level, importers above imported ones. For lips: the number of programs."""
    inside = sorted(modules().find_children(package))
    if package == "lips":
        return [[f"{len(inside)} programs"]]
    order = TopologicalSorter(imports_among(name for name in inside if modules().find_children(name)))
    order.prepare()
    levels = []
    while order.is_active():
        ready = order.get_ready()
        levels.append(sorted(name.removeprefix(f"{package}.") for name in ready))
        order.done(*ready)
    return levels[::-1]


def reduced(graph: Graph) -> Graph:
    """Return the graph without implied arrows. With a to b and b to c, an arrow from a to c is dropped."""
    below: Graph = {}
    for package in TopologicalSorter(graph).static_order():
        below[package] = graph[package].union(*(below[p] for p in graph[package]))
    return {package: to - set().union(*(below[p] for p in to)) for package, to in graph.items()}


def draw(theme: Theme) -> Drawing:
    assert set(packages()) == set(PLACES), "each package has a place in PLACES"
    boxes = build({package: rooms_of(package) for package in PLACES})
    height = boxes["libsym"].bottom + MARGIN
    drawing = Drawing(theme, WIDTH, height, "The packages of Symphony, the rooms in them, and what imports what")
    drawing.box(0.5, 0.5, WIDTH - 1, height - 1, fill=theme.page, radius=8)
    draw_roof(drawing, boxes["symphony"])
    for i, line in enumerate(LEGEND):
        room = PLACES["symphony"].x - 2 * MARGIN
        drawing.words(MARGIN, 30 + 18 * i, line, room=room, on=theme.page, colour=theme.quiet, size=12)
    for package, box in boxes.items():
        draw_package(drawing, package, box)
    for package, imported in reduced(imports_among(PLACES)).items():
        for other in sorted(imported):
            assert boxes[package].bottom < boxes[other].top, f"{package} imports {other}, which stands higher"
            draw_import(drawing, boxes[package], boxes[other])
    return drawing


def build(levels: dict[str, list[list[str]]]) -> dict[str, Box]:
    """Return the boxes, built from the bottom upwards. Boxes that stand on the same package end at the same height."""
    tops: dict[str, int] = {}
    bottoms: dict[str, int] = {}
    for package, place in PLACES.items():
        ceiling = min((tops[carrier] for carrier in place.on), default=0)
        tops |= dict.fromkeys(place.on, ceiling)
        bottoms[package] = ceiling - GAP
        tops[package] = bottoms[package] - HEAD - len(levels[package]) * (ROOM + ROOM_GAP)
    down = MARGIN + ROOF - min(tops.values())
    return {p: Box(PLACES[p], tops[p] + down, bottoms[p] + down, levels[p]) for p in PLACES}


def draw_roof(drawing: Drawing, box: Box) -> None:
    left, right = box.place.x - EAVES, box.place.x + box.place.width + EAVES
    drawing.path(f"M{left} {box.top}L{(left + right) / 2:g} {MARGIN}L{right} {box.top}z", fill=drawing.theme.box)


def draw_package(drawing: Drawing, package: str, box: Box) -> None:
    """Draw a package's box with its rooms. Rooms of one level share the width."""
    theme, place = drawing.theme, box.place
    drawing.box(place.x, box.top, place.width, box.bottom - box.top, fill=theme.box)
    x, inner = place.x + PAD, place.width - 2 * PAD
    drawing.words(
        x, box.top + 20, f"{package}/", room=inner, on=theme.box, colour=theme.accent, size=14, mono=True, bold=True
    )
    drawing.words(x, box.top + 37, place.caption, room=inner, on=theme.box, size=12)
    for i, level in enumerate(box.levels):
        height = (box.bottom - box.top - HEAD) / len(box.levels) - ROOM_GAP
        width = (inner + ROOM_GAP) / len(level) - ROOM_GAP
        y = box.top + HEAD + i * (height + ROOM_GAP)
        for j, room in enumerate(level):
            left = x + j * (width + ROOM_GAP)
            drawing.box(left, y, width, height, fill=theme.room, radius=4)
            drawing.words(
                left + width / 2, y + height / 2 + 4, room, room=width, on=theme.room, size=12, mono=True, centred=True
            )


def draw_import(drawing: Drawing, upper: Box, lower: Box) -> None:
    """Draw an arrow, in the middle of the overlap of the two boxes."""
    one, two = upper.place, lower.place
    x = (max(one.x, two.x) + min(one.x + one.width, two.x + two.width)) / 2
    drawing.arrow_down(x, upper.bottom, lower.top)
