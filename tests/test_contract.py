"""The house rules that source can show: arrows point one way, every package is the tree's own, doors are made early."""

import json
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ["libsym", "kvfs", "decoder", "triton_kernels", "scheduler", "symphony", "lips"]


def run_python(source: str, *, directory: Path = ROOT) -> str:
    command = [sys.executable, "-c", source]
    return subprocess.run(command, cwd=directory, check=True, capture_output=True, text=True, timeout=60).stdout


FORBIDDEN = {
    "libsym/errors.py": ["numpy"],
    "kvfs/pages/pool.py": ["decoder.cpu.arena", "torch"],
    "decoder/batch.py": ["kvfs.images.model_facts", "torch", "triton", "transformers"],
    "scheduler/batch/policy.py": ["symphony.settings.config"],
    "lips/ask.py": ["kvfs.pages.table"],
}


def test_the_checks_look_at_all_rules_of_the_house():
    """scripts/test begins with the checks, so that here only broken copies are looked at."""
    checks = (ROOT / "scripts/check").read_text()
    for name in ("lint-imports", "scripts/check_doors.py", "scripts/check_unused.py", "scripts/check_prose.py"):
        assert re.search(rf"^check .*{name}", checks, re.MULTILINE)
    assert "\nscripts/check\n" in (ROOT / "scripts/test").read_text()


@pytest.mark.slow
def test_the_import_contract_catches_every_forbidden_import(tmp_path):
    """The contract is checked on a copy of the tree, so that one without effect shows."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("*.so", "*.c", "*.h"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for module, names in FORBIDDEN.items():
        with (tmp_path / module).open("a", encoding="utf-8") as target:
            target.write("".join(f"\nimport {name}\n" for name in names))
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    command = [sys.executable, "-c", program, "--no-cache", "--no-logo"]
    done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True, timeout=60)
    report = done.stdout + done.stderr
    assert done.returncode == 1, report
    told = {line for line in report.splitlines() if "->" in line}
    for module, names in FORBIDDEN.items():
        importer = module.removesuffix(".py").replace("/", ".")
        for name in names:
            arrow = rf"{re.escape(importer)} -> {re.escape(name)}\b"
            assert any(re.search(arrow, line) for line in told), (importer, name, report)


def said(script: str, root: Path) -> list[str]:
    command = [sys.executable, str(ROOT / "scripts" / script), str(root)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == (1 if done.stdout else 0), done.stderr
    return done.stdout.splitlines()


def test_a_function_that_another_object_puts_into_an_attribute_is_found(tmp_path):
    """Exceptions that are no longer needed are found too, as all of them are here."""
    (tmp_path / "kvfs").mkdir()
    (tmp_path / "kvfs/room.py").write_text(
        """
from kvfs.other import somewhere as elsewhere

def nothing():
    pass

class Pool:
    def __init__(self, size):
        self.size = size
        self.told = self.free
        self.free = nothing
        self.rank: Callable[[], int] = len

    def free(self):
        def done():
            pass
        pool.lambda_, pool.size = lambda: 0, self.size
        self.other.partial = partial(done, 1)
        other.name = done
        other.first = other.method = self.pool.free
        other.rank = rank
        other.given = given or elsewhere
""",
        encoding="utf-8",
    )
    (tmp_path / "kvfs/other.py").write_text("def somewhere():\n    pass\n", encoding="utf-8")
    found = [line for line in said("check_doors.py", tmp_path) if line.startswith("kvfs/room.py")]
    others = [f"other.{name}" for name in ("first", "given", "method", "name", "rank")]
    assert [line.split()[1] for line in found] == [*others, "pool.lambda_", "self.other.partial"]
    known = runpy.run_path(str(ROOT / "scripts/check_doors.py"))["KNOWN"]
    assert sum("take it out" in line for line in said("check_doors.py", tmp_path)) == len(known)


def test_a_name_that_only_itself_a_test_an_import_or_another_module_of_that_name_uses_is_found(tmp_path):
    for name in ("kvfs", "libsym", "tests", "scripts"):
        (tmp_path / name).mkdir()
    (tmp_path / "kvfs/room.py").write_text(
        """
import socketserver
from kvfs.other import imported, named as elsewhere

__all__ = ["LISTED"]
LISTED = USED = FIRST = 1

class Pool:
    def __init__(self): self.size = FIRST
    def tested(self): pass
    def again(self): return self.again()
    def called(self, again): return again
    def looked_up(self): return getattr(self, "looked_" + "up") or getattr(self, "by_name")
    def by_name(self): return USED

class Handler(socketserver.BaseRequestHandler):
    def handle(self): elsewhere(Pool().called(1).looked_up, Handler)

def helper(): return lib.from_python()
""",
        encoding="utf-8",
    )
    (tmp_path / "kvfs/other.py").write_text("def imported(): pass\ndef named(): pass\ndef helper(): pass\n", "utf-8")
    (tmp_path / "kvfs/user.py").write_text("from kvfs.other import helper\nhelper()\n", "utf-8")
    (tmp_path / "kvfs/core.c").write_text(
        "int declared(void);\nint declared(void) {\n}\nint from_python(void) { from_c(); }\nvoid from_c(void) {}\n",
        "utf-8",
    )
    (tmp_path / "libsym/calls.py").write_text("__all__ = ['Public']\nclass Public:\n    def ask(self): pass\n", "utf-8")
    (tmp_path / "tests/test_room.py").write_text("from kvfs.room import Pool\nPool().tested()\n", "utf-8")
    (tmp_path / "scripts/run").write_text("nothing to see\n", "utf-8")
    lines = said("check_unused.py", tmp_path)
    found = {line.split()[3].rstrip(":") for line in lines if "nobody" in line}
    assert found == {"LISTED", "Pool.tested", "Pool.again", "Handler", "helper", "imported", "declared"}
    assert "kvfs/core.c:2: nobody uses declared: take it out" in lines
    known = runpy.run_path(str(ROOT / "scripts/check_unused.py"))["KNOWN"]
    assert sum("take it out of KNOWN" in line for line in lines) == len(known)


def test_a_docstring_that_begins_without_its_subject_is_found(tmp_path):
    (tmp_path / "kvfs").mkdir()
    (tmp_path / "kvfs/room.py").write_text(
        """'''Those who wait.'''
class Pool:
    '''Pages.'''
    size = 1
    '''What there is.'''
    def free(self):
        '''`It` is gone.'''
    def used(self):
        '''Itemised.'''
""",
        encoding="utf-8",
    )
    found = [line.rpartition(": ")[0] for line in said("check_prose.py", tmp_path)]
    assert found == ["kvfs/room.py:1", "kvfs/room.py:5", "kvfs/room.py:7"]


def test_the_contract_names_every_package_of_the_tree():
    in_tree = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    with (ROOT / "pyproject.toml").open("rb") as settings:
        tools = tomllib.load(settings)["tool"]
    typed = set(tools["mypy"]["files"]) - {"scripts", "tests"}
    assert in_tree == set(PACKAGES) == set(tools["importlinter"]["root_packages"]) == typed


DAEMONS = {"torch", "trio", "numpy", "scheduler", "kvfs", "decoder"}


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        ("libsym", {*DAEMONS, "tokenizers", "triton", "symphony"}),
        ("symphony.cli", {"torch", "trio", "numpy", "decoder.model"}),
        ("symphony.launcher.__main__, symphony.launcher.supervising.launcher", {*DAEMONS, "libsym"}),
        pytest.param(
            "symphony.daemon.daemon", {"torch", "triton", "transformers", "symphony.fleet"}, marks=pytest.mark.slow
        ),
    ],
)
def test_what_is_imported_loads_nothing_heavy(modules, heavy):
    """A program, the command line, the launcher and the daemon each start without what they can do without."""
    loaded = set(json.loads(run_python(f"import json, sys, {modules}; print(json.dumps([*sys.modules]))")))
    assert modules.rpartition(", ")[2] in loaded
    assert loaded & heavy == set()


def test_each_mutant_of_the_soak_of_conversations_has_its_place_in_the_code():
    mutants = runpy.run_path(str(ROOT / "scripts/soak/conversation_mutants.py"), run_name="mutants")["MUTANTS"]
    places = {mutant.what: (ROOT / mutant.file).read_text().count(mutant.old) for mutant in mutants}
    assert set(places.values()) == {1}, places
