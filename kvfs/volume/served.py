"""`Served`: what the files of one served model share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvfs.images.format import ImageFormat
from kvfs.images.model_facts import ModelFacts
from kvfs.names.content import KvFile
from kvfs.names.inode import Inode
from kvfs.pages.pool import PagePool
from kvfs.tiers.pager import Pager
from kvfs.tiers.tickets import Engine


class Serving(NamedTuple):
    """A further model to serve: see `Volume`."""

    pool: PagePool
    facts: ModelFacts
    engine: Callable[[], Engine]


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """The pages of one model, the facts for images of its files, and the files by their rows."""

    facts: ModelFacts
    image_format: ImageFormat
    pool: PagePool
    pager: Pager
    engine: Callable[[], Engine]
    files: dict[int, tuple[Inode, KvFile]] = field(default_factory=dict)
    """The inode and KV file of each row of the pager. The inode may have other content by now."""
