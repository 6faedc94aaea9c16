import os
import resource
import struct

import gguf
import numpy as np
import pytest

from decoder.checkpoints.gguf import read_gguf
from decoder.checkpoints.quants import ENCODINGS, dequantize
from decoder.model import load_model
from libsym.errors import Invalid, NotFound, SymError
from tests.decoder.small_checkpoints import gguf_tensors, values_of, write_gguf

SHORT_OF_A_CHUNK, MORE_THAN_A_CHUNK = 7, 9001  # blocks of 32: a chunk has 8192


def decoded(name: str, stored: np.ndarray) -> tuple[np.ndarray, bool]:
    encoding = ENCODINGS[name]
    out = np.empty(stored.size // encoding.block_bytes * encoding.block_values, np.float32)
    finite = dequantize(encoding, stored.reshape(-1).data, out)
    return out, finite


def assert_same_bits(got: np.ndarray, expected: np.ndarray) -> None:
    assert np.array_equal(got.view(np.uint32), expected.reshape(-1).view(np.uint32))


@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize("num_blocks", [SHORT_OF_A_CHUNK, MORE_THAN_A_CHUNK])
def test_stored_values_decode_as_the_gguf_package_decodes_them(name, num_blocks):
    """Numbers of a checkpoint, or any bytes in blocks."""
    encoding, kind, rng = ENCODINGS[name], gguf.GGMLQuantizationType[name], np.random.default_rng(2)
    if name.startswith(("Q", "IQ", "MX")):
        stored = rng.integers(0, 256, (num_blocks, encoding.block_bytes), dtype=np.uint8)
        # float16 scales that are finite: the top exponent bit is cleared wherever a scale may lie.
        last = {"Q6_K": [209], "Q2_K": [81, 83], "Q3_K": [109], "MXFP4": [0], "Q4_1": [1, 3], "Q5_1": [1, 3]}
        for at in last.get(name, [1, 3] if name in {"Q4_K", "Q5_K"} else [1]):
            stored[:, at] &= 0xBF
    else:
        stored = gguf.quants.quantize(rng.standard_normal((1, num_blocks * 32), dtype=np.float32), kind)
    got, finite = decoded(name, stored.view(np.uint8))
    assert finite
    assert_same_bits(got, gguf.quants.dequantize(stored, kind))


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_value_that_is_not_finite_is_noticed_wherever_it_is(bad):
    values = np.zeros(1_000_000, np.float32)
    assert decoded("F32", values.view(np.uint8))[1]
    values[-1] = bad
    assert not decoded("F32", values.view(np.uint8))[1]


NUMBERS = {"uint8": 200, "int8": -3, "uint16": 60_000, "int16": -9, "uint32": 7, "int32": -70_000, "uint64": 1 << 40}
OTHERS = {"int64": -1, "float32": 0.25, "float64": 1 / 3, "bool": True, "string": "grüße\n"}
ARRAYS = (["a", "", "🎉"], [-1, 2, 3], [0.5, -2.0], [True, False])


@pytest.mark.parametrize(("kind", "value"), [*(NUMBERS | OTHERS).items(), *(("array", each) for each in ARRAYS)])
def test_metadata_of_every_type_is_read_back(tmp_path, kind, value):
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    getattr(writer, f"add_{kind}")("before", value)
    writer.add_string("behind", "there")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    read = read_gguf(tmp_path / "a.gguf").metadata
    assert read["before"] == value
    assert type(read["before"]) is type(value)
    assert read["behind"] == "there"


def test_a_custom_alignment_is_honoured(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_custom_alignment(256)
    arrays = {name: np.arange(6, dtype=np.float32).reshape(2, 3) + i for i, name in enumerate("abc")}
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for name, stored in read_gguf(tmp_path / "a.gguf").tensors.items():
        assert np.array_equal(values_of(stored), arrays[name])


def test_what_is_no_file_is_refused(tmp_path):
    (tmp_path / "empty.gguf").touch()
    os.mkfifo(tmp_path / "pipe.gguf")
    for path, error, reason in (
        (tmp_path / "none.gguf", NotFound, r"none\.gguf"),
        (tmp_path / "empty.gguf", Invalid, "the file is empty"),
        (tmp_path / "pipe.gguf", Invalid, "not a file"),
        (tmp_path, Invalid, "is a directory"),
    ):
        with pytest.raises(error, match=reason):
            read_gguf(path)


def header(magic: bytes = b"GGUF", version: int = 3, tensors: int = 0, metadata: int = 0, rest: bytes = b"") -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, metadata) + rest


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def tensor(name: bytes, sizes: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def one_key(rest: bytes, key: bytes = b"k") -> bytes:
    return header(metadata=1, rest=text(key) + rest)


def array_of(kind: int, count: int, rest: bytes = bytes(9)) -> bytes:
    return one_key(struct.pack("<IIQ", 9, kind, count) + rest)


def one_tensor(sizes: list[int], rest: bytes = b"", **options: int) -> bytes:
    return header(tensors=1, rest=tensor(b"t", sizes, **options) + rest)


HUGE = (1 << 64) - 1
FLAG = text(b"k") + struct.pack("<IB", 7, 1)
DAMAGED = {
    "magic": (header(magic=b"GGML"), "does not begin with GGUF"),
    "version 1": (header(version=1), "GGUF version 1"),
    "big-endian version": (header(version=3 << 24), "little-endian"),
    "only a magic": (b"GGUF", "ends within the version"),
    "absurd tensor count": (header(tensors=HUGE), "tensors, more than it can hold"),
    "absurd metadata count": (header(metadata=HUGE), "metadata entries, more than it can hold"),
    "count just beyond the end": (header(metadata=3, rest=bytes(30)), "more than it can hold"),
    "absurd key length": (header(metadata=1, rest=struct.pack("<Q", HUGE) + bytes(20)), "ends within a metadata key"),
    "long key": (one_key(bytes(20), b"k" * 2000), "of 2000 characters"),
    "key not UTF-8": (one_key(bytes(20), b"\xff\xfe"), "not UTF-8"),
    "unknown type": (one_key(struct.pack("<I", 99) + bytes(9)), "unknown type 99"),
    "key twice": (header(metadata=2, rest=FLAG * 2), "'k' twice"),
    "array of arrays": (array_of(9, 1, bytes(99)), "elements of type 9"),
    "absurd array": (array_of(4, HUGE), "more than it can"),
    "absurd strings": (array_of(8, HUGE), "more than it can"),
    "string past the end": (array_of(8, 2, text(b"a") + struct.pack("<Q", HUGE)), "ends within metadata 'k'"),
    "text not UTF-8": (array_of(8, 1, text(b"\xff")), "not UTF-8"),
    "no dimensions": (one_tensor([], bytes(8)), "0 dimensions"),
    "five dimensions": (one_tensor([1] * 5), "5 dimensions"),
    "absurd sizes": (one_tensor([HUGE] * 4), "ends within the tensor 't'"),
    "empty tensor": (one_tensor([0, 4]), "impossible for F32"),
    "half a block": (one_tensor([33, 2], kind=3), "impossible for Q4_1"),
    "type without a decoder": (one_tensor([32], kind=16), "as IQ2_XXS, which is not supported"),
    "type of no known format": (one_tensor([32], kind=99), "as ggml type 99, which is not supported"),
    "tensor past the end": (one_tensor([4], offset=HUGE), "ends within the tensor 't'"),
    "tensor twice": (header(tensors=2, rest=tensor(b"t", [4]) * 2 + bytes(99)), "'t' twice"),
    "alignment zero": (one_key(struct.pack("<II", 4, 0), b"general.alignment"), "the alignment 0"),
}


@pytest.mark.parametrize(("data", "reason"), DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_header_is_refused_with_the_file_and_the_reason(tmp_path, data, reason):
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(Invalid, match=reason) as caught:
        read_gguf(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.slow
def test_a_file_cut_anywhere_is_refused(tmp_path):
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for length in [*range(0, 600, 2), *range(600, len(whole), 1009), len(whole) - 33]:
        path.write_bytes(whole[:length])
        with pytest.raises(Invalid, match=r"cut\.gguf"):
            load_model(str(path))


@pytest.mark.slow
def test_hundreds_of_random_mutations_load_or_are_refused_without_harm(tmp_path):
    path = write_gguf(tmp_path / "small.gguf")
    assert load_model(str(path)).name == "small"
    whole = path.read_bytes()
    data_start = whole.index(b"blk.1.ffn_down.weight") + 100
    rng = np.random.default_rng(5)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = 0
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(rng.integers(1, 5)):
            at = int(rng.integers(0, data_start if rng.random() < 0.9 else len(whole)))
            damaged[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, int(rng.integers(0, 256))])
        path.write_bytes(damaged)
        try:
            load_model(str(path))
        except SymError as error:
            refused += 1
            assert str(path) in str(error)  # noqa: PT017 - loading may also succeed
            assert "\n" not in str(error)  # noqa: PT017
    assert 40 < refused < 400
    # A model of 1 MB: nothing that a header claims may have been allocated.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 200 << 10


def test_the_tensors_of_a_small_file_are_what_was_written(tmp_path):
    arrays = gguf_tensors()
    tensors = read_gguf(write_gguf(tmp_path / "a.gguf", encoding="Q8_0")).tensors
    assert tensors.keys() == arrays.keys()
    for name, stored in tensors.items():
        assert np.abs(values_of(stored) - arrays[name]).max() <= np.abs(arrays[name]).max() / 100
