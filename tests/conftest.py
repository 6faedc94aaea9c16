"""Settings of the whole test process. They are made before any test module is imported."""

import gc
import inspect
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.forked import Forked, Forker
from tests.patches import Patches
from tests.workers import pytest_addoption, pytest_configure  # noqa: F401 - hooks

# Triton decides at its import whether kernels run in its interpreter, and transformers imports Triton.
# On a machine with a GPU, TRITON_INTERPRET=0 runs the kernel tests there.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Torch's threads spin while they wait for each other. At the tests' small shapes they only waste the processors.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Some images of containers turn bytecode off. Then each daemon and each command of a test would compile its modules.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Daemons of tests keep no packed weights, unless a test names a directory.
os.environ["SYMPHONY_WEIGHTS_CACHE"] = ""

# A shell makes its background processes ignore SIGINT. The programs that tests start and interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

Forked.forkers = cache(Forker.importing)

OWN_PROCESSES = {"start_daemon", "own_launchers", "start_gateway"}
"""Fixtures that start processes for one test. A test that has one of them is slow."""

gc.disable()  # imports of tests leave little garbage; `pytest_collection_finish` enables collections


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files first whose tests may take long, as their timeouts say. Else one worker has them in the end."""
    long = {item.path for item in items if item.get_closest_marker("timeout")}
    items.sort(key=lambda item: item.path not in long)


def pytest_itemcollected(item: pytest.Item) -> None:
    if OWN_PROCESSES & {*getattr(item, "fixturenames", ())}:
        item.add_marker("slow")


def pytest_collection_finish() -> None:
    """Freeze what the collection of tests has made. Otherwise each full collection of garbage takes half a second."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    """Let libraries look at their objects and free them. Some of them name each object that is left."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine: by its first argument with a `run_test`, or in the loop that `backend` names."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    made: dict[str, Any] = pyfuncitem.funcargs
    given = {name: made[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    own = partial(anyio.run, backend=made.get("backend", "trio"))
    run = next((each.run_test for each in given.values() if hasattr(each, "run_test")), own)
    run(partial(pyfuncitem.obj, **given))
    return True


@pytest.fixture(scope="session", autouse=True)
def _others_come_in(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Open pytest's private directories to other users, whom tests start there. Only the tested code may stop these."""
    base, top = tmp_path_factory.getbasetemp(), Path(tempfile.gettempdir())
    for directory in (base, *base.parents):
        if top in directory.parents:
            directory.chmod(0o755)


@pytest.fixture
def monkeypatch() -> Iterator[Patches]:
    """pytest's fixture, but a function that replaces one of ours must be called."""
    patches = Patches()
    try:
        yield patches
    finally:
        patches.undo()
    assert not patches.uncalled, f"patched, and never called: {', '.join(patches.uncalled)}"
