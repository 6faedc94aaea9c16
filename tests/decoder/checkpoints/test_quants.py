"""Decoders of quantised types against a reference that reads each format's definition one number at a time."""

import numpy as np
import pytest

from decoder.checkpoints.quants import ENCODINGS, dequantize

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def half(block: np.ndarray, at: int) -> np.float32:
    return np.float32(block[at : at + 2].view(np.float16)[0])


def q2_k(block, i):
    part, run, place = i // 128, i // 32 % 4, i % 32
    code = block[16 + 32 * part + place] >> 2 * run & 3
    scale = int(block[i // 16])
    return half(block, 80) * np.float32(scale & 15) * np.float32(code) - half(block, 82) * np.float32(scale >> 4)


def q3_k(block, i):
    part, run, place, group = i // 128, i // 32 % 4, i % 32, i // 16
    code = int(block[32 + 32 * part + place] >> 2 * run & 3) - (0 if block[place] >> (4 * part + run) & 1 else 4)
    low = int(block[96 + group % 8]) >> (4 if group >= 8 else 0) & 15
    scale = (low | (int(block[104 + group % 4]) >> 2 * (group // 4) & 3) << 4) - 32
    return half(block, 108) * np.float32(scale) * np.float32(code)


def iq4_nl(block, i):
    return half(block, 0) * np.float32(IQ4[block[2 + i % 16] >> (4 if i >= 16 else 0) & 15])


def iq4_xs(block, i):
    group, place = i // 32, i % 32
    low = int(block[4 + group // 2]) >> 4 * (group % 2) & 15
    scale = (low | (int(block[2:4].view(np.uint16)[0]) >> 2 * group & 3) << 4) - 32
    code = block[8 + 16 * group + place % 16] >> (4 if place >= 16 else 0) & 15
    return half(block, 0) * np.float32(scale) * np.float32(IQ4[code])


def mxfp4(block, i):
    code = int(block[1 + i % 16]) >> (4 if i >= 16 else 0) & 15
    return np.float32(2.0 ** (int(block[0]) - 127) * FP4[code & 7] * (-1 if code & 8 else 1))


@pytest.mark.parametrize("reference", [q2_k, q3_k, iq4_nl, iq4_xs, mxfp4], ids=lambda each: each.__name__)
def test_every_number_is_what_the_definition_says(reference):
    encoding, rng = ENCODINGS[reference.__name__.upper()], np.random.default_rng(4)
    blocks = rng.integers(0, 256, (40, encoding.block_bytes), dtype=np.uint8)
    for at in {"q2_k": [81, 83], "q3_k": [109], "mxfp4": [0]}.get(reference.__name__, [1]):
        blocks[:, at] &= 0xBF  # finite float16; exponents that are not 255
    out = np.empty((40, encoding.block_values), np.float32)
    assert dequantize(encoding, blocks.reshape(-1).data, out)
    expected = [[reference(block, i) for i in range(encoding.block_values)] for block in blocks]
    assert np.array_equal(out, np.array(expected, np.float32))


@pytest.mark.parametrize(("kind", "at"), [("Q2_K", 80), ("Q2_K", 82), ("Q3_K", 108), ("IQ4_NL", 0), ("IQ4_XS", 0)])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_scale_that_is_not_finite_is_noticed(kind, at, bad):
    encoding = ENCODINGS[kind]
    blocks = np.full((3, encoding.block_bytes), 0x11, np.uint8)
    blocks[1, at : at + 2] = np.array([bad], np.float16).view(np.uint8)
    assert not dequantize(encoding, blocks.reshape(-1).data, np.empty((3, encoding.block_values), np.float32))


def test_the_largest_exponent_of_mxfp4_is_noticed():
    blocks = np.full((3, 17), 0x77, np.uint8)
    blocks[2, 0] = 255
    assert not dequantize(ENCODINGS["MXFP4"], blocks.reshape(-1).data, np.empty((3, 32), np.float32))
