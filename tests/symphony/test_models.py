"""Models by name, on a daemon whose operator has named its model."""

import os
import shlex
from typing import Any

import pytest

import libsym as sym
from tests.symphony.conftest import connected_to
from tests.symphony.daemons import SYMPHONY
from tests.symphony.launchers import eventually


@pytest.fixture
def chat(start_daemon, monkeypatch):
    """A daemon whose model is called chat."""
    daemon = start_daemon("--model", "chat=tiny", "--kv-memory", "8M", "--precision", "float32")
    yield from connected_to(daemon, monkeypatch)


def test_programs_shells_and_files_know_a_model_by_the_name_that_the_operator_gave_it(chat):
    assert sym.model_info().name == sym.model_info("chat").name == sym.daemon_stat()["model"] == "chat"
    with sym.kv_create("a.kv", model="chat") as kv:
        assert sym.pred(kv, sym.tokenize("Hi")).argmax() >= 0
    assert os.getxattr(chat.mount / "a.kv", "user.kv.model") == b"chat"
    control = chat.mount / ".symphony"
    assert [each.name for each in (control / "models").iterdir()] == ["chat"]
    assert (control / "models/chat").read_text() == (control / "model").read_text()
    assert (control / "model").read_text().startswith("name:")
    _, row, _ = chat.shell(f"{shlex.join(SYMPHONY)} du --by-model").stdout.splitlines()
    assert row.split()[-2:] == ["chat", "float32"]


def test_a_connection_to_a_model_gives_its_texts_and_files_and_an_unknown_name_leaves_nothing_behind(chat):
    with sym.connection(model="chat"):
        kv = sym.kv_create("b.kv")
        assert sym.model_info().name == "chat"
        assert sym.detokenize(sym.tokenize("Grüße")) == "Grüße"
        assert kv.len() == 0
    for ask in (
        lambda: sym.connection(model="small"),
        lambda: sym.kv_create("c.kv", model="small"),
        lambda: sym.model_info("small"),
    ):
        with pytest.raises(sym.Invalid, match=r"^there is no model 'small' here: this daemon serves chat$"):
            ask()
    wrong: list[Any] = ["", "a\0b", 7]
    for name in wrong:
        with pytest.raises(sym.Invalid, match="give the name of a model"):
            sym.connection(model=name)
    assert not (chat.mount / "c.kv").exists()
    eventually(lambda: sym.daemon_stat()["lips"] == 1)
