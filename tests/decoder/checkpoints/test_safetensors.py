import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from decoder.checkpoints.safetensors import read_checkpoint_tensors, read_safetensors
from libsym.errors import Invalid, NotFound, SymError
from tests.decoder.small_checkpoints import values_of

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def write(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_value_is_the_one_that_was_saved(tmp_path, dtype):
    generator = torch.Generator().manual_seed(0)
    tensors = {
        # Odd sizes, so that later tensors lie at odd offsets.
        "a": torch.randn(3, generator=generator).to(DTYPES[dtype]),
        "b": torch.randn(129, 77, generator=generator).to(DTYPES[dtype]),
        "c": torch.randn(600, 500, generator=generator).to(DTYPES[dtype]),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    read = read_safetensors(tmp_path / "model.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert np.array_equal(values_of(read[name]), tensor.float().numpy())


def test_the_index_finds_each_tensor_in_its_file(tmp_path):
    shards = {"one.safetensors": {"a": torch.ones(3)}, "two.safetensors": {"b": torch.zeros(2), "c": torch.ones(1)}}
    for file, tensors in shards.items():
        save_file(tensors, tmp_path / file)
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    read = read_checkpoint_tensors(tmp_path)
    assert {name: values_of(stored).tolist() for name, stored in read.items()} == {
        name: tensor.tolist() for tensors in shards.values() for name, tensor in tensors.items()
    }
    assert read["b"].file == tmp_path / "two.safetensors"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_a_checkpoint_in_a_pickle_alone_is_refused_by_name(tmp_path, name):
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(Invalid, match=rf"{name}: the weights are in a pickle, which can run any code"):
        read_checkpoint_tensors(tmp_path)
    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    assert list(read_checkpoint_tensors(tmp_path)) == ["a"]


@pytest.mark.parametrize(
    ("weight_map", "error", "reason"),
    [
        ({"a": "gone.safetensors"}, NotFound, r"gone\.safetensors"),
        ({"x": "one.safetensors"}, NotFound, "has no tensor 'x'"),
        ({"a": "../one.safetensors"}, Invalid, "not a safetensors file beside the index"),
        ({"a": "/etc/passwd"}, Invalid, "not a safetensors file beside the index"),
        ({"a": 7}, Invalid, "not a safetensors file beside the index"),
        (["a"], Invalid, "has no weight_map"),
        (None, Invalid, "has no weight_map"),
    ],
)
def test_an_index_that_points_nowhere_is_refused(tmp_path, weight_map, error, reason):
    with pytest.raises(NotFound, match=r"model\.safetensors"):
        read_checkpoint_tensors(tmp_path)
    save_file({"a": torch.ones(3)}, tmp_path / "one.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(error, match=reason):
        read_checkpoint_tensors(tmp_path)


DAMAGED = {
    "not JSON": (b"not json", "is not JSON"),
    "no object": (b"[1, 2]", "not a JSON object"),
    "bytes that are no text": (b"\xff\xfe\xff", "is not JSON"),
    "nested deeply": (b"[" * 100_000, "nested too deeply"),
    "a name twice": (b'{"a": 1, "a": 2}', "comes twice"),
    "a number of many digits": (b'{"a": ' + b"9" * 5000 + b"}", "is not JSON"),
    "no description": ({"a": 7}, "is described as '7'"),
    "no dtype": ({"a": {"shape": [2], "data_offsets": [0, 8]}}, "is described as"),
    "three offsets": ({"a": entry(offsets=[0, 8, 9])}, "is described as"),
    "real offsets": ({"a": entry(offsets=[0, 8.0])}, "is described as"),
    "a type without a decoder": ({"a": entry(dtype="F8_E4M3")}, "'F8_E4M3', which is not supported"),
    "a negative size": ({"a": entry(shape=[-2])}, "impossible shape"),
    "an empty tensor": ({"a": entry(shape=[0], offsets=[0, 0])}, "impossible shape"),
    "an absurd size": ({"a": entry(shape=[1 << 62])}, "impossible shape"),
    "many dimensions": ({"a": entry(shape=[1] * 99)}, "impossible shape"),
    "a size that is a truth": ({"a": entry(shape=[True])}, "impossible shape"),
    "offsets past the end": ({"a": entry(offsets=[8, 1 << 40])}, "of 8 data bytes"),
    "offsets backwards": ({"a": entry(offsets=[8, 0])}, "of 8 data bytes"),
    "negative offsets": ({"a": entry(offsets=[-8, 0])}, "of 8 data bytes"),
    "fewer bytes than the shape": ({"a": entry(shape=[3])}, "does not take 8 bytes"),
}


@pytest.mark.parametrize(("header", "reason"), DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_header_is_refused_with_the_file_and_the_reason(tmp_path, header, reason):
    path = write(tmp_path / "bad.safetensors", header, bytes(8))
    with pytest.raises(Invalid, match=reason) as caught:
        read_safetensors(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("data", [b"abc", struct.pack("<Q", 1 << 63), struct.pack("<Q", 3) + b"{"])
def test_a_header_longer_than_the_file_is_refused(tmp_path, data):
    (tmp_path / "bad.safetensors").write_bytes(data)
    with pytest.raises(Invalid, match="claims a header of"):
        read_safetensors(tmp_path / "bad.safetensors")


@pytest.mark.slow
def test_a_thousand_random_mutations_are_read_or_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(4, 3), "b": torch.ones(5, dtype=torch.bfloat16)}, path, metadata={"format": "pt"})
    whole = path.read_bytes()
    header_end = 8 + int.from_bytes(whole[:8], "little")
    rng = np.random.default_rng(3)
    refused = 0
    for _ in range(1000):
        damaged = bytearray(whole)
        for _ in range(rng.integers(1, 4)):
            damaged[rng.integers(0, header_end)] = rng.choice([0x22, 0x2C, 0x30, 0x39, 0x5D, 0x7D, 0xFF, 0x20])
        path.write_bytes(damaged)
        try:
            for stored in read_safetensors(path).values():
                values_of(stored)
        except SymError as error:
            refused += 1
            assert str(path) in str(error)  # noqa: PT017 - reading may also succeed
    assert 250 < refused < 1000
