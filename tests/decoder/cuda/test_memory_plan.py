import pytest
import torch

from decoder.cuda.memory_plan import MIN_FRAMES, choose_dtypes, plan_memory
from decoder.tiny import tiny_config
from libsym.errors import NoSpace

LLAMA_8B = {
    "name": "Llama-3-8B",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "num_layers": 32,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "ffn_size": 14336,
    "max_positions": 8192,
    "tie_embeddings": False,
}
GB = 10**9


def test_what_weights_and_workspace_leave_becomes_frames():
    plan = plan_memory(tiny_config(**LLAMA_8B), torch.bfloat16, "BF16", 140 * GB, 100 * GB)
    assert 16.0 * GB < plan.weight_bytes < 16.1 * GB
    assert plan.page_bytes == 4 << 20
    assert plan.workspace_bytes < 2.5 * GB
    used = plan.weight_bytes + plan.workspace_bytes + plan.num_frames * plan.page_bytes
    assert 100 * GB - plan.page_bytes < used <= 100 * GB


def test_narrower_kv_gives_twice_the_frames():
    plans = [plan_memory(tiny_config(**LLAMA_8B), torch.bfloat16, dtype, 80 * GB) for dtype in ("BF16", "F8_E4M3")]
    assert abs(plans[1].num_frames - 2 * plans[0].num_frames) <= 1


def test_a_model_that_does_not_fit_is_refused_in_one_line_with_figures():
    with pytest.raises(NoSpace, match=r"^Llama-3-8B does not fit the GPU: 16\.06 GB of weights.*14\.40 GB may be used"):
        plan_memory(tiny_config(**LLAMA_8B), torch.bfloat16, "BF16", 16 * GB)
    with pytest.raises(NoSpace, match=r"16\.00 GB may be used: choose a smaller model, or say a larger --gpu-memory$"):
        plan_memory(tiny_config(**LLAMA_8B), torch.bfloat16, "BF16", 140 * GB, 16 * GB)
    with pytest.raises(NoSpace, match=r"--gpu-memory is 20\.00 GB, 16\.00 GB of the GPU's memory are free"):
        plan_memory(tiny_config(**LLAMA_8B), torch.bfloat16, "BF16", 16 * GB, 20 * GB)


def test_the_fewest_frames_are_enough_for_an_assembly():
    assert MIN_FRAMES > 33


def test_kv_is_kept_in_the_precision_unless_something_else_is_said():
    assert choose_dtypes("bf16", None) == (torch.bfloat16, "BF16")
    assert choose_dtypes("float16", "fp8") == (torch.float16, "F8_E4M3")
