"""A model of the daemon: its checkpoint without the weights, its arena, its identity, and the loader of its weights."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from decoder.checkpoints.weights import Weights
from decoder.cpu.backend import choose_isa
from decoder.cpu.precision import choose_precision
from decoder.image_facts import Facts
from decoder.model import Model, load_model
from kvfs.durable.superblock import newest_superblocks
from symphony.daemon.backends import Backend, build_backend
from symphony.daemon.model_text import LoadedText
from symphony.daemon.weights_loading import WeightsLoading
from symphony.settings.config import Config

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DaemonModel:
    """A model that the daemon serves. Its decoder comes later, from `weights`."""

    model: Model
    """Everything but the weights, which `weights` owns alone, so that it can free them."""
    precision: str
    backend: Backend
    weights: WeightsLoading
    facts: Facts
    """The identity of the model's KV."""
    text: LoadedText

    @property
    def name(self) -> str:
        return self.model.name


def build_model(config: Config) -> DaemonModel:
    """Read the model that the configuration names, and allocate its arena. SymError: that can't be done."""
    model = load_model(config.model)
    if config.precision == "auto":
        identities = [block.facts.identity for block in newest_superblocks(config.state / "slots")]
        precision, why = choose_precision(model, choose_isa(), identities)
        log.info("precision %s: %s", precision, why)
        config = replace(config, precision=precision)
    backend = build_backend(config, model)
    weights = WeightsLoading(backend, model.weights)
    model = replace(model, weights=Weights({}))
    facts = Facts(model, backend.arena, config.precision)
    text = LoadedText(model, backend.arena, backend.description, str(config.mount))
    return DaemonModel(model, config.precision, backend, weights, facts, text)
