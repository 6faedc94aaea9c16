"""The state directory of each release opens with the tree of today, and everything in it goes on.

`tests/fixtures/state-VERSION.tar.xz` is such a state; `python -m tests.fixtures.plant` made it with the tree of that
release. A processor with another instruction set may open it here, so logits are not compared.
"""

import json
import shutil
import tarfile

import pytest

import libsym as sym
import symphony
from tests.fixtures import plant
from tests.lips.gateway.conftest import Gateway
from tests.symphony.daemons import a_daemon

STATES = sorted(plant.HERE.glob("state-*.tar.xz"))


def test_the_first_release_with_conversations_has_a_state():
    assert "state-0.2.0.tar.xz" in [path.name for path in STATES]
    assert symphony.__version__ >= "0.2.0"


@pytest.fixture(scope="module", params=STATES, ids=lambda path: path.name.removesuffix(".tar.xz"))
def opened(request, tmp_path_factory):
    """A daemon on the state of a release, this process connected; afterwards fsck finds nothing wrong."""
    directory = tmp_path_factory.mktemp("state")
    with tarfile.open(request.param) as packed:
        packed.extractall(directory, filter="data")
    with a_daemon(directory, *plant.OPTIONS) as daemon:
        sym.connect(str(daemon.socket))
        yield daemon, json.loads((directory / "facts.json").read_text())
        sym.daemon_check()
        sym.close()
    daemon.symphony("fsck", "--state", str(directory / "state"))


@pytest.mark.slow
def test_every_file_is_there_and_goes_on(opened):
    daemon, facts = opened
    for path, tokens in facts["files"].items():
        assert sym.kv_read(path)[0] == tokens
        with sym.kv_open(path, "rw") as kv:
            assert list(sym.pred(kv, [5]).topk(1))
            assert kv.len() == len(tokens) + 1
            sym.kv_truncate(kv, len(tokens))
    assert (daemon.mount / "notes.txt").read_text() == "a plain file\n"
    shutil.copyfile(daemon.mount.with_name("exported.kv"), daemon.mount / "imported.kv")
    assert sym.kv_read("imported.kv")[0] == facts["files"]["handbook.kv"]


@pytest.mark.slow
def test_a_chat_goes_on_and_its_turns_are_undone_one_by_one(opened):
    _, facts = opened
    with sym.Chat(sym.kv_open("chat.kv", "rw")) as chat:
        assert len(chat.ask("And I?", max_tokens=4).full_text()) > 0
    for question in ("And I?", *reversed(plant.QUESTIONS)):
        text = sym.detokenize(sym.kv_read("chat.kv")[0])
        assert text.count(f"user: {question}\n") == 1
        with sym.Chat(sym.kv_open("chat.kv", "rw")) as chat:
            chat.undo()
    assert sym.kv_stat("chat.kv").tokens < len(facts["files"]["chat.kv"]) / 2


@pytest.mark.slow
def test_the_gateway_s_conversations_and_responses_go_on(opened):
    daemon, facts = opened
    known, turn = facts["gateway"], {"messages": [{"role": "user", "content": "And I?"}], **plant.TURN}
    gateway = Gateway(daemon)
    try:
        with gateway.client() as http:
            listed = {each["name"]: each["tokens"] for each in http.get("/sessions").json()["sessions"]}
            assert listed == known["sessions"]
            for name, num_tokens in listed.items():
                answer = http.post("/v1/chat/completions", json={**turn, "conversation": name}).raise_for_status()
                assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == num_tokens
                assert [each["content"] for each in http.get(f"/sessions/{name}").json()["messages"]][2] == "And I?"
            body = {"input": "And I?", "previous_response_id": known["response"], "max_output_tokens": 4}
            answer = http.post("/v1/responses", json=body).raise_for_status()
            assert answer.json()["usage"]["input_tokens_details"]["cached_tokens"] > 0
    finally:
        gateway.stop()
    assert [path.name for path in daemon.mount.glob("gateway*")] == ["gateway"], "of before, and so still used"
