"""The house rules that source can show: arrows point one way, every package is the tree's own, doors are made early."""

import importlib
import json
import runpy
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


def lint_imports(directory: Path) -> tuple[int, str]:
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    command = [sys.executable, "-c", program, "--no-cache", "--no-logo"]
    done = subprocess.run(command, cwd=directory, check=False, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


def test_the_import_contract_is_kept():
    status, report = lint_imports(ROOT)
    assert status == 0, report


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("libsym/errors.py", "numpy"),
        ("kvfs/pages/pool.py", "decoder.cpu.arena"),
        ("kvfs/pages/pool.py", "torch"),
        ("decoder/batch.py", "kvfs.images.model_facts"),
        ("decoder/batch.py", "torch"),
        ("decoder/batch.py", "triton"),
        ("decoder/batch.py", "transformers"),
        ("scheduler/batch/policy.py", "symphony.settings.config"),
        ("lips/ask.py", "kvfs.pages.table"),
    ],
)
def test_the_import_contract_catches_a_forbidden_import(tmp_path, module, forbidden):
    """The contract is checked on a copy of the tree, so that one without effect shows."""
    for package in PACKAGES:
        for source in (ROOT / package).rglob("*.py"):
            copy = tmp_path / source.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(source.read_bytes())
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    with (tmp_path / module).open("a", encoding="utf-8") as target:
        target.write(f"\nimport {forbidden}\n")
    status, report = lint_imports(tmp_path)
    assert status == 1, report
    assert "BROKEN" in report


def said(script: str, root: Path) -> list[str]:
    command = [sys.executable, ROOT / "scripts" / script, root]
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
    known = runpy.run_path(ROOT / "scripts/check_doors.py")["KNOWN"]
    assert sum("take it out" in line for line in said("check_doors.py", tmp_path)) == len(known)
    assert not said("check_doors.py", ROOT)
    assert "check_doors.py" in (ROOT / "scripts/check").read_text(encoding="utf-8")


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
    known = runpy.run_path(ROOT / "scripts/check_unused.py")["KNOWN"]
    assert sum("take it out of KNOWN" in line for line in lines) == len(known)
    assert not said("check_unused.py", ROOT)
    assert "check_unused.py" in (ROOT / "scripts/check").read_text(encoding="utf-8")


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
    assert not said("check_prose.py", ROOT)
    assert "check_prose.py" in (ROOT / "scripts/check").read_text(encoding="utf-8")


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_imported_is_the_trees_own(package):
    """`triton_kernels` and `scheduler` also exist on PyPI."""
    assert Path(importlib.import_module(package).__file__) == ROOT / package / "__init__.py"


def test_the_contract_names_every_package_of_the_tree():
    in_tree = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    with (ROOT / "pyproject.toml").open("rb") as settings:
        tools = tomllib.load(settings)["tool"]
    typed = set(tools["mypy"]["files"]) - {"scripts/bench"}
    assert in_tree == set(PACKAGES) == set(tools["importlinter"]["root_packages"]) == typed


def test_a_program_that_imports_libsym_loads_nothing_heavy():
    source = "import json, sys, libsym; print(json.dumps(sorted(name.partition('.')[0] for name in sys.modules)))"
    loaded = set(json.loads(run_python(source)))
    assert "libsym" in loaded
    assert (
        loaded & {"torch", "trio", "numpy", "tokenizers", "triton", "kvfs", "decoder", "scheduler", "symphony"} == set()
    )


def test_the_command_line_starts_without_the_daemons_libraries():
    source = "import json, sys, symphony.cli; print(json.dumps(sorted(sys.modules)))"
    loaded = set(json.loads(run_python(source)))
    assert "symphony.cli" in loaded
    assert loaded & {"torch", "trio", "numpy", "decoder.model"} == set()


def test_the_launcher_starts_without_libsym_and_the_daemons_libraries():
    modules = "symphony.launcher.__main__, symphony.launcher.supervising.launcher"
    source = f"import json, sys, {modules}; print(json.dumps(sorted(sys.modules)))"
    loaded = set(json.loads(run_python(source)))
    assert "symphony.launcher.supervising.supervisor" in loaded
    assert loaded & {"libsym", "torch", "trio", "numpy", "scheduler", "kvfs", "decoder"} == set()


@pytest.mark.slow
def test_the_daemon_runs_without_torch_and_triton():
    loaded = set(
        json.loads(run_python("import json, sys, symphony.daemon.daemon; print(json.dumps(sorted(sys.modules)))"))
    )
    assert "symphony.daemon.daemon" in loaded
    assert loaded & {"torch", "triton", "transformers"} == set()


def test_each_mutant_of_the_soak_of_conversations_has_its_place_in_the_code():
    mutants = runpy.run_path(str(ROOT / "scripts/soak/conversation_mutants.py"), run_name="mutants")["MUTANTS"]
    places = {mutant.what: (ROOT / mutant.file).read_text().count(mutant.old) for mutant in mutants}
    assert set(places.values()) == {1}, places
