"""The manual pages libsym(3) and libsym-*(3): every call with its arguments, every error, examples that hold."""

import errno
import inspect
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import libsym as sym
from libsym.abi import ABI_VERSION, Op
from tests.symphony.examples import run_examples

MAN = Path(__file__).resolve().parents[2] / "man"
SOURCES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(MAN.glob("libsym*.3"))}
SOURCE = "".join(SOURCES.values())


def plain(line: str) -> str:
    escapes = {"\\-": "-", "\\(dq": '"', "\\(aq": "'", "\\&": "", "\\e": "\\", "\\fB": "", "\\fI": ""}
    for written, read in escapes.items():
        line = line.replace(written, read)
    return line.replace("\\fP", "")


def headings() -> dict[str, str]:
    found = [plain(line) for line in re.findall(r'^\.SS "?(.*?)"?$', SOURCE, re.MULTILINE)]
    return {re.findall(r"\w+", heading)[0]: heading for heading in found}


def examples() -> dict[str, str]:
    """Return the examples of the page by the section or call above them."""
    found, at = {}, ""
    for block in re.finditer(r'^\.S[SH] "?(\w[\w ,]*)[^\n]*$|^\.EX\n(.*?)^\.EE$', SOURCE, re.MULTILINE | re.DOTALL):
        if block[1]:
            at = block[1]
        else:
            assert at not in found, f"two examples of {at}: make them one"
            found[at] = "\n".join(map(plain, block[2].splitlines())) + "\n"
    return found


EXAMPLES = examples()
FUNCTIONS = {name for name in sym.__all__ if inspect.isfunction(getattr(sym, name))}
ADVICE = {"TTL", "PRIORITY"}
"""Described with kv_advise()."""


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_its_example_does_what_it_says(name, shared):
    sym.close()
    run_examples(EXAMPLES[name], f"the manual of libsym, {name}", shared.mount)


@pytest.mark.parametrize("page", SOURCES)
def test_a_page_has_examples_and_the_first_names_it(page):
    assert ".EX\n>>> " in SOURCES[page]
    assert f".BR {page} (3)\n".replace("-", "\\-") in SOURCES["libsym"]


def test_every_call_has_an_entry_with_an_example_and_the_version_of_the_abi_is_this_one():
    assert f"version {ABI_VERSION}" in plain(SOURCE)
    assert set(headings()) - set(sym.__all__) == set()
    assert FUNCTIONS - set(headings()) == ADVICE
    assert set(headings()) - set(EXAMPLES) == set()
    assert set(sym.__all__) - set(re.findall(r"\w+", plain(SOURCE))) == set(), "every name is mentioned"


def test_the_entries_name_the_arguments_that_there_are():
    def arguments(signature):
        return [(each.name, each.kind, each.default) for each in signature.parameters.values()]

    for name, heading in headings().items():
        found = getattr(sym, name)
        if "(" not in heading or inspect.isclass(found):
            continue
        described: dict[str, Any] = {}
        exec(f"def {heading.partition(' ->')[0]}: pass", {"detokenize": sym.detokenize}, described)
        assert arguments(inspect.signature(described[name])) == arguments(inspect.signature(found)), heading


def test_classes_are_described_with_all_that_they_have():
    words = set(re.findall(r"\w+", plain(SOURCE)))
    for cls in (sym.KV, sym.Dist, sym.ReducedDist, sym.Draws, sym.Sampler, sym.Usage, sym.KvStat, sym.ModelInfo):
        internal = {"exchange", "give_up", "moved", "named", "num_cuts", "from_json", "is_locked", "talker"}
        public = {name for name in dir(cls) if not name.startswith("_")} - internal
        assert public - words == set(), cls


def test_every_error_is_listed_with_its_errno_and_what_its_docstring_says():
    section = SOURCES["libsym-errors"].partition("\n.SH ERRORS\n")[2].partition("\n.SH ")[0]
    listed = {
        name: (code, text) for name, code, text in re.findall(r'^\.BR (\w+) " \((\w+)\)"\n(.*)$', section, re.MULTILINE)
    }
    classes = {cls.__name__: cls for cls in sym.SymError.__subclasses__() if cls.__module__.startswith("libsym.")}
    del classes["BatchFailed"]  # has the errno of the call that failed
    assert listed == {
        name: (errno.errorcode[cls.code], (cls.__doc__ or "").partition("\n")[0]) for name, cls in classes.items()
    }


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="NO C COMPILER: apt-get install gcc")
def test_the_client_in_c_of_the_pages_is_built_and_writes_the_likeliest_text(shared, tmp_path):
    pages = [plain((MAN / f"libsym-{page}.7").read_text(encoding="utf-8")) for page in ("abi", "operations")]
    ((build, run),) = {re.findall(r"^\.EX\n\$ (.*)\n\$ (.*)\n\.EE$", page, re.MULTILINE)[0] for page in pages}
    greedy = tmp_path / "greedy"
    build = build.replace(" greedy", f" {greedy}").replace("cc ", "cc -Wall -Wextra -Werror ", 1)
    subprocess.run(build, shell=True, check=True, cwd=MAN.parent)
    assert re.sub("[^ ]+", "", run, count=1) == ' "$SYMPHONY_SOCKET" "Once upon a time" 32'

    def likeliest(prompt, count):
        return sym.generate(sym.kv_create(), sym.tokenize(prompt), max_tokens=count, stop_at_end=False).full_text()

    for socket, prompt, count, status, out, err in (
        (shared.socket, "Once upon a time", 32, 0, likeliest("Once upon a time", 32) + "\n", ""),
        (shared.socket, "Once upon a time, 世界", 40, 0, likeliest("Once upon a time, 世界", 40) + "\n", ""),
        (tmp_path / "none.sock", "Once", 1, 1, "", "greedy: no daemon listens there\n"),
        (shared.socket, "", 1, 1, "", "at least one token"),
    ):
        done = subprocess.run([greedy, socket, prompt, str(count)], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (status, out)
        assert err in done.stderr


def test_the_page_of_operations_has_every_operation_once():
    page = (MAN / "libsym-operations.7").read_text(encoding="utf-8")
    described = re.findall(r"^\.B ([A-Z][A-Z_, ]+)$", page, re.MULTILINE)
    assert sorted(", ".join(described).split(", ")) == sorted(Op.__members__)
