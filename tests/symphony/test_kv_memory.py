"""How large a page pool may be."""

import logging

import pytest

from decoder.model import load_model
from libsym.errors import Invalid
from symphony.daemon import backends
from symphony.settings.loading import load

MEMORY = 1 << 28


def built(monkeypatch, share):
    monkeypatch.setattr(backends, "total_memory_bytes", lambda: MEMORY)
    config = load(None, {"model": "tiny", "kv_memory": str(int(share * MEMORY))})
    backends.build_backend(config, load_model("tiny")).close()


@pytest.mark.parametrize(("share", "warnings"), [(0.89, 0), (0.91, 1), (1, 1)])
def test_a_pool_of_nearly_all_memory_is_warned_of(monkeypatch, caplog, share, warnings):
    with caplog.at_level(logging.WARNING):
        built(monkeypatch, share)
    assert len([record for record in caplog.records if "of all memory" in record.message]) == warnings


def test_a_pool_of_more_than_all_memory_is_refused(monkeypatch):
    with pytest.raises(Invalid, match="more than all memory that the daemon may have"):
        built(monkeypatch, 1.01)
