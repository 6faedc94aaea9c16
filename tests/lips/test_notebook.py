"""A notebook can do all of it: real cells in a real kernel, beside a daemon with a real model."""

import asyncio
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from tests.lips.conftest import LIPS

pytestmark = pytest.mark.slow


class Notebook(NotebookClient):
    """A notebook whose cells are run one by one. `interrupt` is its stop button, at the first output of a cell."""

    interrupts = False

    async def _stop(self) -> None:
        kernels: Any = self.km
        await kernels.interrupt_kernel()

    def process_message(self, msg, cell, cell_index):
        found = super().process_message(msg, cell, cell_index)
        if self.interrupts and msg["msg_type"] == "stream":
            self.interrupts = False
            self.stopping = asyncio.ensure_future(self._stop())
        return found

    def run(self, source):
        """Run a cell; return its last expression by type ({"text/plain": …, "text/html": …}), and "stdout"."""
        cell = nbformat.v4.new_code_cell(source)
        self.nb.cells.append(cell)
        self.execute_cell(cell, len(self.nb.cells) - 1)
        given = {"stdout": "".join(each.text for each in cell.outputs if each.output_type == "stream")}
        for each in cell.outputs:
            if each.output_type == "execute_result":
                given |= each.data
        return given

    def interrupt(self, source):
        """Runs a cell that does not end, until it has printed something; gives the error that stopped it."""
        self.interrupts = True
        with pytest.raises(CellExecutionError) as stopped:
            self.run(source)
        return stopped.value.ename


@pytest.fixture
def notebook(lips, monkeypatch, tmp_path):
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("PYTHONPATH", str(LIPS.parent))
    client = Notebook(nbformat.v4.new_notebook(), timeout=60, kernel_name="python3")
    with client.setup_kernel():
        client.run("import libsym as sym")
        yield client


def test_cells_call_wait_and_await(notebook):
    shown = notebook.run(
        """
        kv = sym.kv_create("notes.kv")
        dist = await sym.aio.pred(kv, sym.tokenize("The capital of France is"), rows="all")
        dist
    """.replace("\n        ", "\n")
    )
    assert "' Paris'" in shown["text/html"]
    assert shown["text/plain"].startswith("<Dist of 49152 tokens")

    shown = notebook.run("kv")
    assert "The capital of France is" in shown["text/html"]
    assert shown["text/plain"] == "<KV notes.kv, 5 entries, open for writing>"

    shown = notebook.run(
        """
        async with await sym.aio.generate(kv, sym.tokenize(" The capital of Italy is"), max_tokens=3) as generation:
            async for piece in generation.text():
                print(piece, end="")
    """.replace("\n        ", "\n").strip()
    )
    assert "Rome" in shown["stdout"]

    shown = notebook.run("sym.generate(sym.kv_create(), sym.tokenize('One, two, three,'), max_tokens=2).full_text()")
    assert "four" in shown["text/plain"], "calls that wait with the thread work in a cell, where an event loop runs"


def test_a_cell_that_is_stopped_leaves_the_connection_as_it_was(notebook):
    notebook.run("kv = sym.kv_create('kept.kv')\nlength = kv.write(sym.tokenize('One, two,'))")
    endless = "sym.generate(kv, sym.tokenize(' three,'), stop_at_end=False)"
    for cell, error in (
        (f"for token in {endless}:\n    print(token, flush=True)", "KeyboardInterrupt"),
        ("print('waits', flush=True)\nsym.recv()", "KeyboardInterrupt"),
        (f"async for token in await {endless.replace('sym.', 'sym.aio.', 1)}:\n    print(token)", "CancelledError"),
    ):
        assert notebook.interrupt(cell) == error
        notebook.run("sym.kv_truncate(kv, length)\nassert kv.len() == length\nsym.daemon_check()")
    assert "' three'" in notebook.run("kv.fork().pred(kv.read(-1)[0])")["text/html"]
