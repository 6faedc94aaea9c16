"""The reference, which `checkpoints/test_huggingface.py` compares with transformers: its masks."""

import numpy as np
import pytest

from tests.decoder.bench import Call


@pytest.mark.parametrize("shape", [{}, {"qkv_bias": True, "qk_norm": True, "post_norms": True, "attn_softcap": 5.0}])
def test_a_masked_entry_is_as_if_it_were_not_there(reference_bench, shape):
    bench = reference_bench(**shape)
    prompt, first, second, third = list(range(40)), 50, 60, 70
    _, plain = bench.prefill([*prompt, second, third])
    file, _ = bench.prefill(prompt, reserve=3)
    mask = np.ones((3, 43), dtype=np.bool_)
    mask[1:, 40] = False
    # Two branches in one file: the second one's entries have the positions that they would have alone.
    (branches,) = bench.step(Call(file, [first, second, third], positions=[40, 40, 41], mask=mask))
    assert np.abs(branches[1:] - plain[40:]).max() < 1e-4
    (unmasked,) = bench.step(Call(bench.prefill(prompt, reserve=3)[0], [first, second, third]))
    assert np.abs(unmasked[0] - branches[0]).max() == 0
    assert np.abs(unmasked[1:] - branches[1:]).max() > 1e-2


def test_what_a_mask_says_of_later_entries_changes_nothing(reference_bench):
    bench = reference_bench(window=7, sliding_layers=(True, False))
    (expected,) = bench.step(Call(bench.file(30), range(30)))
    (got,) = bench.step(Call(bench.file(30), range(30), mask=np.ones((30, 30), dtype=np.bool_)))
    assert np.array_equal(got, expected)
