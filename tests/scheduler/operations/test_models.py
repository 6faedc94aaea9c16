"""The model that a program gets: by name, by its connection, by default."""

import json
from typing import Any

import pytest

from libsym.abi import Op
from libsym.channel.server import Request
from libsym.errors import Invalid
from scheduler.connection.system_call import SystemCall
from scheduler.operations.kv import KvFiles
from scheduler.operations.models import Choosing, Models
from scheduler.operations.text import Texts
from tests.scheduler.bench import Bench


class Text:
    """Texts of a model that tokenizes nothing as itself."""

    def __init__(self, token: int) -> None:
        self.token = token

    def encode(self, text: str, *, special: bool) -> list[int]:
        del special
        return [self.token] * len(text)

    def info(self) -> dict[str, Any]:
        return {"name": f"model of {self.token}"}


@pytest.fixture
def models() -> Models:
    texts: Any = {"chat": Text(7), "small": Text(9)}
    return Models(texts)


def answer(table, lip, op, payload=b"", args=(0, 0, 0, 0)):
    return table[op].begin(SystemCall(lip, Request(op, 0, 1, 0, args, payload)))


def test_a_connection_uses_the_first_model_until_it_chooses_another(models, tmp_path):
    bench = Bench(tmp_path)
    lip, other = bench.lip(), bench.lip()
    table = {**Choosing(models).table(), **Texts(lambda each: models.of_lip(each).text).table()}
    assert answer(table, lip, Op.TOKENIZE, b"a").payload == (7).to_bytes(4, "little")
    answer(table, lip, Op.USE_MODEL, b"small")
    assert answer(table, lip, Op.TOKENIZE, b"a").payload == (9).to_bytes(4, "little")
    assert json.loads(answer(table, lip, Op.MODEL_INFO).payload)["name"] == "model of 9"
    assert json.loads(answer(table, lip, Op.MODEL_INFO, b"chat").payload)["name"] == "model of 7"
    assert answer(table, other, Op.TOKENIZE, b"a").payload == (7).to_bytes(4, "little")


def test_a_model_that_is_not_served_is_refused_with_the_names_of_those_that_are(models, tmp_path):
    lip = Bench(tmp_path).lip()
    table = Choosing(models).table()
    for op in (Op.USE_MODEL, Op.MODEL_INFO):
        with pytest.raises(Invalid, match=r"no model 'large' here: this daemon serves chat, small$"):
            answer(table, lip, op, b"large")
    assert models.of_lip(lip) is models.default


def test_a_file_belongs_to_the_model_that_its_maker_names(tmp_path):
    bench = Bench(tmp_path)
    table, lip = KvFiles(bench.fs, bench.batches, bench.gate.models).table(), bench.lip()
    for payload in (b"a.kv", b"b.kv\0tiny", b"\0tiny", b""):
        file = lip.file(answer(table, lip, Op.KV_CREATE, payload, (0o600, 0, 0, 0)).args[0])
        assert bench.gate.models.of(file).name == "tiny"
        assert (file.origin is None) == (payload[:1] in {b"", b"\0"})
    with pytest.raises(Invalid, match="no model 'large'"):
        answer(table, lip, Op.KV_CREATE, b"c.kv\0large", (0o600, 0, 0, 0))
    assert sorted(bench.tree.root.entries) == [b"a.kv", b"b.kv"]
