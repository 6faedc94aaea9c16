"""Defaults of a request: draws as the model's makers set them, answers as long as the context."""

import json

import pytest

import libsym as sym
from tests.decoder.test_model import save, small_llama
from tests.lips.gateway.conftest import Gateway
from tests.symphony.daemons import Daemon

QUESTION = {"messages": [{"role": "user", "content": "hi"}], "seed": 7, "max_tokens": 30}


def said(http, **options):
    answer = http.post("/v1/chat/completions", json={**QUESTION, **options})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def test_a_model_whose_makers_say_nothing_draws_at_seven_tenths(http):
    assert said(http) == said(http, temperature=0.7, top_p=0.95)
    assert said(http) != said(http, temperature=1.0, top_p=1.0)
    response = http.post("/v1/responses", json={"input": "hi", "max_output_tokens": 1}).json()
    assert (response["temperature"], response["top_p"]) == (0.7, 0.95)


@pytest.fixture
def small_gateway(tmp_path):
    """Before a model of 512 positions whose makers say how it draws."""
    directory = tmp_path / "model"
    directory.mkdir()
    save(directory, small_llama())
    (directory / "generation_config.json").write_text(json.dumps({"temperature": 0.4, "repetition_penalty": 1.5}))
    daemon = Daemon(tmp_path, "--model", str(directory))
    try:
        gateway = Gateway(daemon)
        yield gateway
        assert "Traceback" not in gateway.stop()
        assert daemon.stop() == 0, daemon.log.read_text()
    finally:
        daemon.clean_up()


def test_a_checkpoint_says_how_its_tokens_are_drawn_and_a_chat_ends_with_the_context(small_gateway, monkeypatch):
    monkeypatch.setenv("SYMPHONY_SOCKET", str(small_gateway.daemon.socket))
    assert sym.model_info().sampling == {"temperature": 0.4, "repetition_penalty": 1.5}
    sym.close()
    with small_gateway.client() as http:
        assert said(http) == said(http, temperature=0.4, repetition_penalty=1.5)
        assert said(http) != said(http, temperature=0.7, top_p=0.95, repetition_penalty=1.0)
        for most in (None, 100_000):
            whole = {**QUESTION, "max_tokens": most, "ignore_eos": True}
            answer = http.post("/v1/chat/completions", json=whole).json()
            assert answer["choices"][0]["finish_reason"] == "length"
            assert 510 <= answer["usage"]["total_tokens"] <= 513
        text = http.post("/v1/completions", json={"prompt": "hi", "ignore_eos": True}).json()
        assert text["usage"]["completion_tokens"] == 16
