"""Adapter that shows the gate a loaded model's tokenizer, template and limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from decoder.model import Model
from decoder.text.cuts import TextCut
from libsym.abi import PAGE_ENTRIES
from symphony.daemon.backends import KvStore


class LoadedText:
    """Implementation of the gate's `TextModel` and the text view's `TextSource`, over a loaded model."""

    def __init__(self, model: Model, arena: KvStore, backend: str, mount: str) -> None:
        self._model = model
        self._arena = arena
        self._backend = backend
        self._mount = mount
        tokens = range(model.config.vocab_size)
        self.token_texts = [model.tokenizer.token_bytes(token) for token in tokens]  # takes 30 ms for 50,000 tokens

    @property
    def vocab_size(self) -> int:
        return self._model.config.vocab_size

    @property
    def max_positions(self) -> int:
        return self._model.config.max_positions

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._model.tokenizer.eos_ids

    @property
    def special_ids(self) -> frozenset[int]:
        return self._model.tokenizer.special_ids

    def own_encoder(self) -> Callable[[str], list[int]]:
        return self._model.tokenizer.own_encoder()

    def encode(self, text: str, *, special: bool) -> list[int]:
        return self._model.tokenizer.encode(text, special=special)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._model.tokenizer.decode(tokens)

    def cut(self, text: str) -> TextCut | None:
        return self._model.tokenizer.cut(text)

    def chat_template(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        return self._model.tokenizer.chat_template(
            messages, tools, add_generation_prompt=add_generation_prompt, variables=variables
        )

    def chat_tokens(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        *,
        add_generation_prompt: bool,
        after_answer: bool,
        variables: Mapping[str, Any],
        checkpoint: Callable[[], None],
    ) -> list[int]:
        return self._model.tokenizer.chat_tokens(
            messages,
            tools,
            add_generation_prompt=add_generation_prompt,
            after_answer=after_answer,
            variables=variables,
            checkpoint=checkpoint,
        )

    def info(self) -> dict[str, Any]:
        config, tokenizer = self._model.config, self._model.tokenizer
        return {
            "name": self._model.name,
            "architecture": config.architecture,
            "vocab_size": config.vocab_size,
            "max_positions": config.max_positions,
            "num_layers": config.num_layers,
            "hidden_size": config.hidden_size,
            "eos_ids": sorted(tokenizer.eos_ids),
            "special_ids": sorted(tokenizer.special_ids),
            "bos_id": tokenizer.bos_id,
            "sampling": dict(self._model.sampling),
            "dtype": self._arena.dtype,
            "page_entries": PAGE_ENTRIES,
            "entry_bytes": self._arena.page_bytes // PAGE_ENTRIES,
            "backend": self._backend,
            "mount": self._mount,
        }
