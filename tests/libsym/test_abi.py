"""The ABI is declared once, in abi.h: Python has what the build makes of it, and nothing spells it again."""

import ast
import re
import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from libsym import _abi, abi, abi_build
from libsym._channel import ffi, lib

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    path
    for package in ("libsym", "kvfs", "scheduler", "decoder", "symphony")
    for path in sorted((ROOT / package).rglob("*.py"))
    if path.name not in {"_abi.py", "abi_build.py"}
]


def test_what_was_built_is_what_abi_h_says() -> None:
    built = abi_build.MODULE.read_text(encoding="utf-8")
    headers = [header.read_text(encoding="utf-8") for header in abi_build.HEADERS]
    assert built == abi_build.module(*headers), "run libsym/abi_build.py"


def shortened(name: str) -> Iterator[str]:
    """Yield what shorter names are left of `SYM_ADVISE_PIN` as words are cut off its front."""
    while "_" in name:
        name = name.partition("_")[2]
        yield name


def test_the_compiler_reads_the_same_numbers() -> None:
    enums = re.findall(r"^enum (\w+) ", abi_build.HEADERS[0].read_text(encoding="utf-8"), re.MULTILINE)
    assert len(enums) > 5
    for enum in enums:
        title = enum.removeprefix("sym_").title().replace("_", "")
        mine = getattr(abi, title, abi)  # flags are the module's own
        for name, value in ffi.typeof(f"enum {enum}").relements.items():
            assert next(getattr(mine, short) for short in shortened(name) if hasattr(mine, short)) == value, name
    for name in dir(lib):
        if name not in abi_build.NOT_FOR_PYTHON and hasattr(abi, name.removeprefix("SYM_")):
            assert getattr(lib, name) == getattr(abi, name.removeprefix("SYM_")), name
    assert ffi.sizeof("struct sym_reduced") == abi.REDUCED_STRUCT.size
    assert ffi.sizeof("struct sym_scored") == abi.SCORED_STRUCT.size


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("enum sym_wish { SYM_ALL = 1, SYM_NONE };", "SYM_NAME = 1"),
        ("struct sym_wished {\n    uint32_t wish;\n    int64_t when;\n};", "padding"),
        ("#define SYM_SIZE sizeof(int)", "no number"),
    ],
)
def test_what_python_could_not_read_as_c_does_is_refused(wrong: str, why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        abi_build.module(wrong + "\n")


def numbers(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id.isupper():
            try:
                value = ast.literal_eval(node.value)
            except ValueError:
                continue
            if isinstance(value, int):
                yield node.targets[0].id, value


def formats(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = ast.unparse(node.func).removeprefix("struct.")
            if name in {"Struct", "pack", "unpack", "unpack_from", "iter_unpack", "pack_into"}:
                yield plain(str(node.args[0].value))


def plain(form: str) -> str:
    """`=IHHIIQQqqqq` of `=IHHIIQQ4q`."""
    found, count = "", ""
    for letter in form.lstrip("@=<>!"):
        if letter.isdigit():
            count += letter
        else:
            found, count = found + letter * int(count or 1), ""
    return found


@pytest.mark.slow
def test_no_number_and_no_structure_of_the_abi_is_spelled_again_and_no_limit_declared_in_two_packages() -> None:
    """Limits that two packages share stand in abi.h, or in the lower package."""
    of_abi = {name for name, _ in numbers(ast.parse(abi_build.MODULE.read_text(encoding="utf-8")))}
    wire = {plain(each.format) for each in vars(_abi).values() if isinstance(each, struct.Struct)}
    again, packages = [], defaultdict[tuple[str, int], set[str]](set)
    for path in SOURCES:
        tree, package = ast.parse(path.read_text(encoding="utf-8")), path.relative_to(ROOT).parts[0]
        for name, value in numbers(tree):
            again += [f"{path}: {name} = {value}"] if name in of_abi else []
            if name.startswith("MAX_"):
                packages[name, value].add(package)
        if package in {"libsym", "scheduler"}:  # others know other wires
            again += [f"{path}: {form}" for form in formats(tree) if form in wire]
    assert of_abi > {"KV_CREATE", "MAX_BATCH"}
    assert plain(abi.REQUEST_STRUCT.format) in wire
    assert again == []
    assert {found: where for found, where in packages.items() if len(where) > 1} == {}
