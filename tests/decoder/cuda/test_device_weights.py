import threading

import numpy as np
import pytest
import torch

from decoder.checkpoints.llama import EMBED, layer_name
from decoder.checkpoints.weights import Weights
from decoder.cuda.device_weights import load_weights
from decoder.model import load_model
from decoder.tiny import random_weights, tiny_config
from libsym.errors import Invalid
from tests.decoder.cpu.quantized import blocks_of, replaced
from tests.decoder.quantized_checkpoints import gptq, pack_quantized, tensors_of, write_checkpoint

CONFIG = tiny_config(num_layers=1, qkv_bias=True)


def stored_as_bf16(weights: Weights, **options) -> Weights:
    bits = {name: torch.from_numpy(weights.read(name)).bfloat16().view(torch.uint8).numpy() for name in weights.names()}
    stored = (blocks_of(name, "BF16", weights.shape(name), blocks) for name, blocks in bits.items())
    return replaced(weights, *stored, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", [{}, {"interleaved": {layer_name(0, "q"): 4}, "norms_without_one": True}])
def test_weights_are_what_the_checkpoint_says_in_fused_matrices(device, dtype, options):
    weights = stored_as_bf16(random_weights(CONFIG), **options)

    def read(*fields: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([weights.read(layer_name(0, field)) for field in fields])).to(dtype)

    loaded = load_weights(CONFIG, weights, dtype, device)
    (layer,) = loaded.layers
    assert torch.equal(layer.qkv.cpu(), read("q", "k", "v"))
    assert layer.qkv_bias is not None
    assert torch.equal(layer.qkv_bias.cpu(), read("q_bias", "k_bias", "v_bias"))
    assert torch.equal(layer.gate_up.cpu(), read("gate", "up"))
    assert torch.equal(layer.attn_norm.cpu(), read("attn_norm"))
    assert layer.q_norm is None
    assert loaded.head is loaded.embed
    size = dtype.itemsize
    assert loaded.num_bytes == size * sum(int(np.prod(weights.shape(name))) for name in weights.names())


@pytest.mark.parametrize("form", [gptq(4, 32, desc_act=True), pack_quantized(4, "channel", symmetric=False)])
def test_matrices_of_a_quantised_checkpoint_are_decoded(device, form, tmp_path):
    tensors, meant = tensors_of(form)
    model = load_model(str(write_checkpoint(tmp_path, tensors, form.settings)))
    (layer,) = load_weights(model.config, model.weights, torch.float32, device).layers
    expected = np.concatenate([meant[layer_name(0, field)] for field in ("q", "k", "v")])
    assert np.array_equal(layer.qkv.cpu().numpy(), expected)


@pytest.mark.parametrize("name", [EMBED, layer_name(0, "q_bias")])
def test_weights_that_are_not_finite_are_refused(device, name):
    weights = stored_as_bf16(random_weights(CONFIG))
    damaged = np.frombuffer(weights.stored(name).parts[0].data, np.uint16).copy()
    damaged[3] = 0x7F80
    weights = replaced(weights, blocks_of(name, "BF16", weights.shape(name), damaged.view(np.uint8)))
    with pytest.raises(Invalid, match="not finite") as refused:
        load_weights(CONFIG, weights, torch.bfloat16, device)
    assert not [each for each in threading.enumerate() if each.name.startswith("load")], refused


def test_weights_too_large_for_the_precision_are_refused(device):
    arrays = {name: random_weights(CONFIG).read(name) for name in random_weights(CONFIG).names()}
    arrays[EMBED][0, 0] = 1e6
    with pytest.raises(Invalid, match="another --precision"):
        load_weights(CONFIG, Weights.of_arrays(arrays), torch.float16, device)
