"""A router of another project, as far as it reads events: it knows them by the fields of vLLM, and by their places."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgpack
import zmq

BLOCK_SIZE = 32


class Router:
    """A router with the blocks of one machine."""

    def __init__(self, endpoint: str = "", *, high_water: int = 1000) -> None:
        """Subscribe to an endpoint, unless batches come from elsewhere. `high_water`: batches that may wait."""
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        """Parent and tokens of each block by its hash."""
        self._num_children = Counter[int | None]()
        self.topics, self.names = set[str](), list[str]()
        self.num_lost = 0
        """Number of batches that were lost on the way. The router then believes nothing before the next snapshot."""
        self._is_behind, self._next = False, 0
        self._socket: Any = None
        if endpoint:
            self._socket = zmq.Context().socket(zmq.SUB)
            self._socket.setsockopt(zmq.RCVHWM, high_water)
            self._socket.connect(endpoint)
            self._socket.subscribe(b"kv@")

    def close(self) -> None:
        self._socket.context.destroy(linger=0)

    def subscribe_again(self) -> None:
        self._socket.unsubscribe(b"kv@")
        self._socket.subscribe(b"kv@")

    def read(self) -> bool:
        """Read what has come. Return whether a snapshot has come since the beginning."""
        while self._socket.poll(0):
            topic, number, batch = self._socket.recv_multipart()
            assert len(number) == 8
            is_snapshot = msgpack.unpackb(batch)[1][0] == ["AllBlocksCleared"]
            if self.topics and int.from_bytes(number) != self._next:
                self.num_lost += int.from_bytes(number) - self._next
                self._is_behind = True
            self._next = int.from_bytes(number) + 1
            self.topics.add(topic.decode())
            self._is_behind &= not is_snapshot
            if not self._is_behind:
                self.take(batch)
        return "AllBlocksCleared" in self.names

    def take(self, batch: bytes) -> None:
        time_s, events, rank = msgpack.unpackb(batch)
        assert isinstance(time_s, float)
        assert rank == 0
        assert events
        for name, *fields in events:
            self.names.append(name)
            match name:
                case "BlockStored":
                    self._store(*fields)
                case "BlockRemoved":
                    hashes, medium = fields
                    assert medium is None
                    for each in hashes:
                        assert not self._num_children[each], "a parent goes last"
                        parent, _ = self.blocks.pop(each)
                        self._num_children[parent] -= 1
                case "AllBlocksCleared":
                    assert not fields
                    self.blocks.clear()
                    self._num_children.clear()
                case _:
                    raise AssertionError(name)

    def _store(
        self,
        block_hashes: list[int],
        parent_block_hash: int | None,
        token_ids: list[int],
        block_size: int,
        lora_id: None,
        medium: None,
        lora_name: None,
    ) -> None:
        assert (block_size, lora_id, medium, lora_name) == (BLOCK_SIZE, None, None, None)
        assert len(token_ids) == BLOCK_SIZE * len(block_hashes) > 0
        for number, each in enumerate(block_hashes):
            assert 0 <= each < 1 << 63
            assert each not in self.blocks
            assert parent_block_hash is None or parent_block_hash in self.blocks
            tokens = token_ids[number * BLOCK_SIZE : (number + 1) * BLOCK_SIZE]
            self.blocks[each] = parent_block_hash, tuple(tokens)
            self._num_children[parent_block_hash] += 1
            parent_block_hash = each

    def num_known(self, prompt: Sequence[int]) -> int:
        """Return how many tokens of a prompt the machine has, from the first one on."""
        by_place = {place: each for each, place in self.blocks.items()}
        last, num = None, 0
        while (found := by_place.get((last, tuple(prompt[num : num + BLOCK_SIZE])))) is not None:
            last, num = found, num + BLOCK_SIZE
        return num
