"""Draws as a checkpoint's generation configuration sets them."""

import json

import pytest

from decoder.checkpoints.generation_config import read_sampling
from libsym.errors import Invalid


@pytest.mark.parametrize(
    ("said", "sampling"),
    [
        (None, {}),
        ({"eos_token_id": 2, "max_length": 20}, {}),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 0}, {"temperature": 0.6, "top_p": 0.9}),
        ({"top_k": 20, "min_p": 0.1, "pad_token_id": 0}, {"top_k": 20, "min_p": 0.1}),
        ({"do_sample": False, "temperature": None, "top_p": 0.9}, {"temperature": 0.0}),
    ],
)
def test_draws_are_as_the_file_says(tmp_path, said, sampling):
    if said is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(said))
    assert read_sampling(tmp_path) == sampling


@pytest.mark.parametrize("said", [{"temperature": "warm"}, {"top_p": 7}, {"top_k": 0.5}])
def test_a_draw_that_cannot_be_is_an_error_that_names_the_file(tmp_path, said):
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    with pytest.raises(Invalid, match=r"generation_config.json: .*" + next(iter(said))):
        read_sampling(tmp_path)
