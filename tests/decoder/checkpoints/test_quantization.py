"""Quantised checkpoints of Hugging Face mean the weights that their formats say, and damaged ones are refused."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from decoder.checkpoints.llama import layer_name
from decoder.checkpoints.weights import Weights
from decoder.cpu._step import ffi, lib
from decoder.cpu.arena import Arena
from decoder.cpu.backend import CpuDecoder
from decoder.cpu.packed_weights import pack_weights
from decoder.cpu.precision import choose_precision
from decoder.model import Model, load_model
from decoder.model_config import KV_DTYPE
from libsym.errors import Invalid
from symphony.checks.kept_weights import kept_files
from tests.decoder.bench import Bench, assert_close, tokens_of
from tests.decoder.cpu.quantized import unpacked
from tests.decoder.quantized_checkpoints import (
    CONFIG,
    FORMATS,
    Format,
    awq,
    gptq,
    int32,
    pack_quantized,
    tensors_of,
    write_checkpoint,
)

CLOSE = {"bf16": 0.03, "int8": 0.06, "int4": 0.06}
"""Largest error of a logit beside the largest logit."""
Q = "model.layers.0.self_attn.q_proj"
DOWN = layer_name(0, "down")


def write_changed(directory, form: Format, **changes: torch.Tensor | None) -> None:
    """A model of this format, with other tensors of the first layer's Q; None removes one."""
    tensors, _ = tensors_of(form)
    for part, tensor in changes.items():
        tensors.pop(f"{Q}.{part}", None)
        if tensor is not None:
            tensors[f"{Q}.{part}"] = tensor
    write_checkpoint(directory, tensors, form.settings)


def loaded(directory, form: Format, **changes: torch.Tensor | None) -> Model:
    write_changed(directory, form, **changes)
    return load_model(str(directory))


def packed_from(directory, precision: str) -> None:
    model = load_model(str(directory))
    pack_weights(model.config, model.weights, precision)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS.keys())
def test_a_matrix_is_what_the_format_says_whatever_rows_are_read(tmp_path, form):
    tensors, meant = tensors_of(form)
    weights = load_model(str(write_checkpoint(tmp_path, tensors, form.settings))).weights
    assert set(weights.names()) == set(meant)
    for name, expected in meant.items():
        assert np.array_equal(weights.read(name), expected), name
    for first, end in ((0, 1), (3, 5), (7, 33), (126, 128)):
        rows = np.empty((end - first, 256), np.float32)
        weights.rows(DOWN, first, end).read_into(rows)
        assert np.array_equal(rows, meant[DOWN][first:end])


def logits(model: Model, weights: Weights, precision: str) -> np.ndarray:
    arena = Arena(model.config, 8, KV_DTYPE[precision])
    decoder = CpuDecoder(model.config, weights, arena, 1, precision=precision)
    _, rows = Bench(model.config, decoder, arena).prefill(tokens_of(40))
    decoder.close()
    return rows


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS.keys())
def test_logits_are_those_of_the_same_weights_in_float32(tmp_path, form):
    """Logits are the same bits in float32, and close in the precision that `auto` chooses."""
    tensors, meant = tensors_of(form, shift=0)
    model = load_model(str(write_checkpoint(tmp_path, tensors, form.settings)))
    expected = logits(model, Weights.of_arrays(meant), "float32")
    assert np.array_equal(logits(model, model.weights, "float32"), expected)
    precision, _ = choose_precision(model, "avx2")
    assert precision == form.precision
    for each in {"bf16", precision}:
        assert_close(logits(model, model.weights, each), expected, tolerance=CLOSE[each])


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.precision == "int4"])
def test_4_bit_codes_stay_in_their_bits(tmp_path, name):
    """Scales are exact, and a min, which is a zero times a scale, is rounded to a float16."""
    tensors, meant = tensors_of(FORMATS[name])
    model = load_model(str(write_checkpoint(tmp_path, tensors, FORMATS[name].settings)))
    packed = pack_weights(CONFIG, model.weights, "int4")
    matrix = ffi.addressof(packed.layers[0], "down")
    assert matrix.format == lib.SYM_CODES
    rows = model.weights.rows(DOWN, 0, 128)
    mins = rows.encoding.parts(rows.data, 128).mins
    assert (mins is None) == FORMATS[name].is_exact
    for row, expected in enumerate(meant[DOWN]):
        tolerance = 0 if mins is None else 1.001 * 2**-11 * np.abs(mins[row]).max()
        assert np.abs(unpacked(matrix, row, 256) - expected).max() <= tolerance


def test_scattered_groups_and_other_codes_are_refused_4_bits_by_name(tmp_path):
    model = loaded(tmp_path, gptq(4, 32, desc_act=True))
    with pytest.raises(Invalid, match=r"other codes \(7 GPTQ 4-bit act-order, 5 BF16\): .* or say int8"):
        pack_weights(CONFIG, model.weights, "int4")
    assert choose_precision(model, "amx")[1] == (
        "the file has codes that int4 can't keep (7 GPTQ 4-bit act-order, 5 BF16)"
    )


def test_8_bit_floats_may_become_4_bit_codes(tmp_path):
    form = FORMATS["fp8, blocks"]
    model = load_model(str(write_checkpoint(tmp_path, tensors_of(form, shift=0)[0], form.settings)))
    assert choose_precision(model, "amx") == ("int8", "the file has 8-bit floats")
    assert_close(logits(model, model.weights, "int4"), logits(model, model.weights, "float32"), tolerance=0.3)


@pytest.mark.parametrize("group", [16, 48, 80])
def test_groups_that_kernels_cannot_hold_are_decoded(tmp_path, group):
    form = pack_quantized(4, "group", group)
    tensors, meant = tensors_of(form)
    model = load_model(str(write_checkpoint(tmp_path, tensors, form.settings)))
    assert "7 compressed-tensors 4-bit of odd groups" in model.weights.kinds()
    assert np.array_equal(model.weights.read(f"{Q}.weight"), meant[f"{Q}.weight"])


def test_a_short_last_group_is_read(tmp_path):
    """160 inputs in groups of 128."""
    config = dataclasses.replace(CONFIG, hidden_size=160, num_heads=5, num_kv_heads=1)
    form = gptq(4, 128, sym=False)
    tensors, meant = tensors_of(form, config)
    model = load_model(str(write_checkpoint(tmp_path, tensors, form.settings, config)))
    assert np.array_equal(model.weights.read(f"{Q}.weight"), meant[f"{Q}.weight"])
    assert choose_precision(model, "avx2")[0] == "int4"


def test_the_tensors_of_a_matrix_may_lie_in_several_files(tmp_path):
    tensors, meant = tensors_of(awq(32))
    write_checkpoint(tmp_path, tensors, awq(32).settings)
    whole = load_model(str(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    weight_map = {name: f"{index % 3}.safetensors" for index, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    model = load_model(str(tmp_path))
    assert np.array_equal(model.weights.read(f"{Q}.weight"), meant[f"{Q}.weight"])
    assert model.identity == whole.identity
    pack_weights(model.config, model.weights, "int4", cache_directory=tmp_path / "cache").keep()
    (kept,) = kept_files(tmp_path / "cache")
    assert kept.about is not None
    assert {path for path, *_ in kept.about.checkpoint} == {str(path) for path in tmp_path.glob("*.safetensors")}
    (tmp_path / "0.safetensors").touch()
    (kept,) = kept_files(tmp_path / "cache")
    assert kept.state == "outdated"


def test_the_identity_follows_each_tensor_and_the_format(tmp_path):
    form, others = gptq(4, 32, sym=False), {}
    tensors, _ = tensors_of(FP8)
    others["blocks of float8"] = tensors, FP8.settings
    others["other blocks, as many"] = tensors, FP8.settings | {"weight_block_size": [200, 128]}
    tensors, _ = tensors_of(form)
    others["as it is"] = tensors, form.settings
    others["v2"] = tensors, form.settings | {"checkpoint_format": "gptq_v2"}
    for part in ("qweight", "qzeros", "scales"):
        others[part] = tensors | {f"{Q}.{part}": tensors[f"{Q}.{part}"] + 1}, form.settings
    found = {load_model(str(write_checkpoint(tmp_path, *other))).identity["model"] for other in others.values()}
    assert len(found) == len(others)


def test_biases_of_the_family_count_and_empty_ones_of_others_do_not(tmp_path):
    """AutoGPTQ writes a bias of zeros for each module."""
    config, form = dataclasses.replace(CONFIG, qkv_bias=True), gptq(4, 32)
    tensors, meant = tensors_of(form, config)
    for name in [name for name in tensors if name.endswith("o_proj.qweight")]:
        tensors[name.replace("qweight", "bias")] = torch.zeros(128, dtype=torch.float16)
    model = load_model(str(write_checkpoint(tmp_path, tensors, form.settings, config)))
    assert np.array_equal(model.weights.read(f"{Q}.bias"), meant[f"{Q}.bias"])
    tensors["model.layers.0.self_attn.o_proj.bias"][3] = 1
    with pytest.raises(Invalid, match=r"'model\.layers\.0\.self_attn\.o_proj\.bias' is not supported"):
        load_model(str(write_checkpoint(tmp_path, tensors, form.settings, config)))


def test_scales_of_activations_and_empty_zeros_are_left_out(tmp_path):
    extra = {"input_scale": torch.ones(1), "weight_zero_point": torch.zeros(128, 1, dtype=torch.int8)}
    loaded(tmp_path, FORMATS["int8, channels"], **extra)
    with pytest.raises(Invalid, match=r"q_proj\.weight_zero_point' holds I8, and its module has no codes"):
        loaded(tmp_path, FORMATS["int8, channels"], weight_zero_point=torch.ones(128, 1, dtype=torch.int8))


def scheme_with(form: Format, **weights: Any) -> dict[str, Any]:
    settings = json.loads(json.dumps(form.settings))
    settings["config_groups"]["group_0"]["weights"] |= weights
    return settings


AWQ, GPTQ, PACKED = awq(32), gptq(4, 32, sym=False), pack_quantized(4, "group", 32, symmetric=False)
INT8, FLOAT8, FP8 = FORMATS["int8, channels"], FORMATS["float8, blocks"], FORMATS["fp8, blocks"]
OTHER_SETTINGS = {
    "bitsandbytes": (
        AWQ,
        {"quant_method": "bitsandbytes"},
        "config.json: quantization_config.quant_method = bitsandbytes is not",
    ),
    "eetq": (AWQ, {"quant_method": "eetq"}, "quant_method = eetq is not"),
    "hqq": (AWQ, {"quant_method": "hqq"}, "quant_method = hqq is not"),
    "a command to the terminal": (AWQ, {"quant_method": "\n\x1b[2J"}, r"quant_method = \n\x1b[2J is not"),
    "no method": (AWQ, {"bits": 4}, "quant_method = None is not"),
    "a list": (AWQ, [4], "quantization_config = [4] is not supported: objects are"),
    "awq for another kernel": (AWQ, AWQ.settings | {"version": "gemv"}, "version = gemv is not supported: gemm, GEMM"),
    "awq of 3 bits": (AWQ, AWQ.settings | {"bits": 3}, "bits = 3 is not supported: 4 are"),
    "awq, group 0": (AWQ, AWQ.settings | {"group_size": 0}, "group_size = 0 is not supported: whole numbers above 0"),
    "awq, another group": (AWQ, AWQ.settings | {"group_size": 64}, "has the shape [8, 128], not [4, 128]"),
    "gptq of 3 bits": (GPTQ, GPTQ.settings | {"bits": 3}, "bits = 3 is not supported: 4, 8 are"),
    "gptq, truth as bits": (GPTQ, GPTQ.settings | {"bits": True}, "bits = True is not"),
    "gptq, 8 bits for 4": (GPTQ, GPTQ.settings | {"bits": 8}, "has the shape"),
    "gptq, no group": (GPTQ, {"quant_method": "gptq", "bits": 4}, "group_size = None is not"),
    "gptq, bits of each module": (GPTQ, GPTQ.settings | {"dynamic": {"+:x": {"bits": 8}}}, "dynamic = "),
    "marlin": (GPTQ, GPTQ.settings | {"checkpoint_format": "marlin"}, "checkpoint_format = marlin is not"),
    "gptq that is not symmetric": (GPTQ, GPTQ.settings | {"sym": True}, None),
    "sparse": (PACKED, PACKED.settings | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
    "rotated": (PACKED, PACKED.settings | {"transform_config": {"a": 1}}, "transform_config = "),
    "KV in 8 bits": (PACKED, PACKED.settings | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme = "),
    "4-bit floats": (PACKED, PACKED.settings | {"format": "nvfp4-pack-quantized"}, "format = nvfp4-pack-quantized"),
    "mixed": (PACKED, PACKED.settings | {"format": "mixed-precision"}, "format = mixed-precision is not"),
    "no groups": (PACKED, PACKED.settings | {"config_groups": {}}, "config_groups = [] is not"),
    "packed 3 bits": (PACKED, scheme_with(PACKED, num_bits=3), "num_bits = 3 is not supported: 4, 8 are"),
    "packed tensor": (PACKED, scheme_with(PACKED, strategy="tensor"), "strategy = tensor is not"),
    "no group size": (PACKED, scheme_with(PACKED, group_size=None), "group_size = None is not"),
    "another group": (PACKED, scheme_with(PACKED, group_size=64), "has the shape [128, 8], not [128, 4]"),
    "floats for integers": (PACKED, scheme_with(PACKED, type="float"), "type = float is not supported: int are"),
    "no order": (PACKED, scheme_with(PACKED, actorder="group"), "down_proj.weight_g_idx' is missing"),
    "8-bit floats with zeros": (FLOAT8, scheme_with(FLOAT8, symmetric=False), "symmetric = False is not"),
    "a block of one number": (FLOAT8, scheme_with(FLOAT8, block_structure=[128]), "block_structure = [128] is not"),
    "other blocks": (FP8, FP8.settings | {"weight_block_size": [64, 64]}, "has the shape [1, 2], not [2, 4]"),
    "a scale for each row": (FP8, {"quant_method": "fp8"}, None),
    "another fp8": (FP8, FP8.settings | {"fmt": "e5m2"}, "fmt = e5m2 is not supported: e4m3 are"),
}


@pytest.mark.parametrize(("form", "settings", "reason"), OTHER_SETTINGS.values(), ids=OTHER_SETTINGS.keys())
def test_a_configuration_that_is_not_supported_or_does_not_fit_is_refused_in_one_line(tmp_path, form, settings, reason):
    tensors, _ = tensors_of(form)
    write_checkpoint(tmp_path, tensors, settings)
    with pytest.raises(Invalid) as caught:
        packed_from(tmp_path, "bf16")
    assert str(caught.value).startswith(str(tmp_path))
    assert (reason or "") in str(caught.value)
    assert "\n" not in str(caught.value)


def scattered(groups: list[int]) -> torch.Tensor:
    return torch.tensor(groups, dtype=torch.int32)


ONES = [1] * 32
DAMAGED = {
    "no zeros": (AWQ, {"qzeros": None}, "q_proj.qzeros' is missing"),
    "no scales": (GPTQ, {"scales": None}, "q_proj.scales' is missing"),
    "no codes": (GPTQ, {"qweight": None}, "holds I32, and its module has no codes"),
    "codes of floats": (GPTQ, {"qweight": torch.ones(16, 128)}, "is stored as F32, not as I32"),
    "scales of integers": (AWQ, {"scales": int32(np.ones((4, 128)))}, "is stored as I32, not as F32 or F16 or BF16"),
    "codes in one row": (AWQ, {"qweight": int32(np.ones(16))}, "has the shape [16], not ['any', 'any']"),
    "fewer codes": (GPTQ, {"qweight": int32(np.ones((15, 128)))}, "q_proj.g_idx' has the shape [128], not [120]"),
    "more features": (AWQ, {"qweight": int32(np.ones((128, 17)))}, "has the shape [4, 128], not [4, 136]"),
    "a group too far": (GPTQ, {"g_idx": scattered([4] * 128)}, "does not divide 128 inputs into groups of 32"),
    "a group below 0": (GPTQ, {"g_idx": scattered([-1] * 128)}, "does not divide 128 inputs into groups of 32"),
    "uneven groups": (GPTQ, {"g_idx": scattered([0] * 33 + ONES[:31] + [2] * 32 + [3] * 32)}, "does not divide"),
    "another shape": (PACKED, {"weight_shape": torch.tensor([128, 1 << 40])}, "has the shape [128, 16], not [128, "),
    "a negative shape": (PACKED, {"weight_shape": torch.tensor([-128, -128])}, "has the shape [128, 16], not [-128"),
    "no shape": (PACKED, {"weight_shape": None}, "q_proj.weight_shape' is missing"),
    "no packed zeros": (PACKED, {"weight_zero_point": None}, "q_proj.weight_zero_point' is missing"),
    "no scale of bytes": (INT8, {"weight_scale": None}, "q_proj.weight_scale' is missing"),
    "two scales": (INT8, {"weight_scale": torch.ones(2)}, "has the shape [2], not [128, 1] or [128]"),
    "integers for floats": (FP8, {"weight": torch.ones(128, 128, dtype=torch.int8)}, "stored as I8, not as F8_E4M3"),
    "no scale of floats": (FP8, {"weight_scale_inv": None}, "q_proj.weight_scale' is missing"),
    "NaN scales": (GPTQ, {"scales": torch.full((4, 128), torch.nan)}, "not finite"),
    "an infinite scale": (INT8, {"weight_scale": torch.full((128, 1), torch.inf)}, "not finite"),
    "a NaN": (FP8, {"weight": torch.full((128, 128), torch.nan).to(torch.float8_e4m3fn)}, "not finite"),
    "scales too large": (AWQ, {"scales": torch.full((4, 128), 300.0)}, "too large for codes"),
}


@pytest.mark.parametrize(("form", "changes", "reason"), DAMAGED.values(), ids=DAMAGED.keys())
def test_damaged_tensors_are_refused_in_one_line(tmp_path, form, changes, reason):
    write_changed(tmp_path, form, **changes)
    with pytest.raises(Invalid) as caught:
        packed_from(tmp_path, form.precision)
    assert str(caught.value).startswith(str(tmp_path))
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_plain_checkpoint_has_no_codes(tmp_path):
    tensors, _ = tensors_of(AWQ)
    write_checkpoint(tmp_path, tensors, None)
    with pytest.raises(Invalid, match="is stored as 'I32', which is not supported: convert to F32, F16, BF16"):
        load_model(str(tmp_path))


@pytest.mark.slow
def test_hundreds_of_random_mutations_are_read_or_refused(tmp_path):
    """Bytes of the tensors' descriptions, and of the configuration."""
    rng, refused = np.random.default_rng(3), 0
    for form in (AWQ, gptq(4, 32, desc_act=True), PACKED, INT8, FP8):
        write_checkpoint(tmp_path, tensors_of(form)[0], form.settings)
        for file, start, end in (("config.json", b'"quant_method"', b"}"), ("model.safetensors", b"{", b"}}")):
            whole = (tmp_path / file).read_bytes()
            first, last = whole.index(start), whole.index(end, whole.index(start))
            for _ in range(60):
                damaged = bytearray(whole)
                damaged[rng.integers(first, last)] = rng.choice([0x22, 0x2C, 0x30, 0x39, 0x5D, 0x7D, 0xFF, 0x20])
                (tmp_path / file).write_bytes(damaged)
                try:
                    weights = load_model(str(tmp_path)).weights
                    for name in weights.names():
                        weights.read(name)
                except Invalid as error:
                    refused += 1
                    assert "\n" not in str(error)  # noqa: PT017 - reading may also succeed
            (tmp_path / file).write_bytes(whole)
    assert 200 < refused < 600
