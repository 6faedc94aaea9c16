"""Graphs of steps: when a step runs without a graph, is captured, and is replayed. The graphs here only note their
calls.
"""

from types import SimpleNamespace
from typing import cast

import pytest

from decoder.cuda.device import Device
from decoder.cuda.graphs import DecodeGraphs, DecodeSize

SIZES = [DecodeSize(rows, 64, is_shared=False) for rows in (1, 2, 4)]


@pytest.fixture
def noted(monkeypatch) -> list[str]:
    notes: list[str] = []

    class Graph:
        def capture_begin(self, *, pool: object, capture_error_mode: str) -> None:
            assert pool == "pool"
            assert capture_error_mode == "thread_local"
            notes.append("begin")

        def capture_end(self) -> None:
            notes.append("end")

        def replay(self) -> None:
            notes.append("replay")

    monkeypatch.setattr("torch.cuda.CUDAGraph", Graph)
    monkeypatch.setattr("torch.cuda.graph_pool_handle", lambda: "pool")
    return notes


@pytest.fixture
def graphs(noted) -> DecodeGraphs:
    return DecodeGraphs(cast(Device, SimpleNamespace(is_gpu=True)), lambda size: noted.append(f"run {size.rows}"))


def test_a_size_runs_then_is_captured_and_replayed_then_is_one_launch(graphs, noted):
    for expected in (["run 1"], ["begin", "run 1", "end", "replay"], ["replay"], ["replay"]):
        noted.clear()
        graphs.run(SIZES[0])
        assert noted == expected


def test_the_graph_that_was_not_used_for_the_longest_time_goes(graphs, noted, monkeypatch):
    monkeypatch.setattr("decoder.cuda.graphs.MAX_GRAPHS", 2)
    for size in SIZES * 2:  # the third takes the place of the first
        graphs.run(size)
    graphs.run(SIZES[1])
    noted.clear()
    graphs.run(SIZES[0])  # takes the place of the third
    assert noted == ["begin", "run 1", "end", "replay"]
    noted.clear()
    graphs.run(SIZES[1])
    assert noted == ["replay"]
    noted.clear()
    graphs.run(SIZES[2])
    assert noted[0] == "begin"


def test_a_capture_that_fails_ends_and_keeps_no_graph(graphs, noted, monkeypatch):
    def fails(size: DecodeSize) -> None:
        raise RuntimeError(f"no memory for {size.rows} rows")

    graphs.run(SIZES[0])
    noted.clear()
    with monkeypatch.context() as broken:
        broken.setattr(graphs, "_run", fails)
        with pytest.raises(RuntimeError, match="no memory for 1 rows"):
            graphs.run(SIZES[0])
    assert noted == ["begin", "end"]
    graphs.run(SIZES[0])
    assert noted[-4:] == ["begin", "run 1", "end", "replay"]


def test_without_a_gpu_nothing_is_captured(noted):
    device = cast(Device, SimpleNamespace(is_gpu=False))
    graphs = DecodeGraphs(device, lambda size: noted.append(f"run {size.rows}"))
    for _ in range(3):
        graphs.run(SIZES[0])
    assert noted == ["run 1"] * 3
