"""The step as a loop in C has it called."""

import numpy as np
import pytest

from tests.scheduler.through_c import ThroughC, mixed_calls


@pytest.mark.slow
def test_through_c_the_step_gives_its_own_bits(cuda_bench, request):
    outs, pages = [], []
    for is_through_c in (False, True):
        bench = cuda_bench(num_layers=1)
        calls = mixed_calls(bench)
        if is_through_c:
            bench.decoder = ThroughC(bench.decoder.step, bench.config)
            request.addfinalizer(bench.decoder.close)
        outs.append(
            bench.step(*calls, copies=[(int(calls[0].file.pages[0]), 3, 32), (int(calls[2].file.pages[0]), 4, 32)])
        )
        outs[-1] += bench.step(*(type(call)(call.file, [5]) for call in calls))  # decodes alone, from a graph
        pages.append(bytes(bench.arena.view(0, 64)))
    for direct, called in zip(*outs, strict=True):
        assert np.isfinite(direct).all()
        assert np.array_equal(direct, called)
    assert any(pages[0])
    assert pages[0] == pages[1]
