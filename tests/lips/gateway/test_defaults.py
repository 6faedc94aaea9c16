"""Defaults of a request: draws as the model's makers set them, answers as long as the context."""

import json

import pytest

from tests.decoder.small_checkpoints import save, small_model
from tests.lips.gateway.conftest import gateways
from tests.lips.gateway.wire import CHAT, COMPLETIONS, RESPONSES, post, user
from tests.symphony.daemons import a_daemon

QUESTION = {"messages": user("hi"), "seed": 7, "max_tokens": 30}


def said(http, **options):
    return post(http, CHAT, QUESTION, **options)["choices"][0]["message"]["content"]


@pytest.mark.slow
def test_a_model_whose_makers_say_nothing_draws_at_seven_tenths(http):
    assert said(http) == said(http, temperature=0.7, top_p=0.95)
    assert said(http) != said(http, temperature=1.0, top_p=1.0)
    response = post(http, RESPONSES, input="hi", max_output_tokens=1)
    assert (response["temperature"], response["top_p"]) == (0.7, 0.95)


@pytest.mark.slow
def test_a_checkpoint_says_how_its_tokens_are_drawn_and_a_chat_ends_with_the_context(tmp_path):
    """A model of 512 positions, whose makers say how it draws."""
    directory = tmp_path / "model"
    directory.mkdir()
    save(directory, small_model("Llama", max_position_embeddings=512, initializer_range=0.3))
    (directory / "generation_config.json").write_text(json.dumps({"temperature": 0.4, "repetition_penalty": 1.5}))
    with a_daemon(tmp_path, "--model", str(directory)) as daemon, gateways(daemon) as start, start().client() as small:
        assert said(small) == said(small, temperature=0.4, repetition_penalty=1.5)
        assert said(small) != said(small, temperature=0.7, top_p=0.95, repetition_penalty=1.0)
        for most in (None, 100_000):
            answer = post(small, CHAT, {**QUESTION, "max_tokens": most}, ignore_eos=True)
            assert answer["choices"][0]["finish_reason"] == "length"
            assert 510 <= answer["usage"]["total_tokens"] <= 513
        text = post(small, COMPLETIONS, prompt="hi", ignore_eos=True)
        assert text["usage"]["completion_tokens"] == 16
