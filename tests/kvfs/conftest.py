from __future__ import annotations

import pytest

from kvfs.image import ImageFormat
from kvfs.pages import PagePool
from tests.kvfs.fakes import FakeDecoder, FakeFacts, FakeStore


@pytest.fixture
def facts() -> FakeFacts:
    return FakeFacts()


@pytest.fixture
def store(facts: FakeFacts) -> FakeStore:
    return FakeStore(facts, num_pages=16)


@pytest.fixture
def pool(store: FakeStore) -> PagePool:
    return PagePool(store)


@pytest.fixture
def image_format(facts: FakeFacts) -> ImageFormat:
    return ImageFormat(facts)


@pytest.fixture
def decoder(store: FakeStore) -> FakeDecoder:
    return FakeDecoder(store)
