"""The peer of gpu.py: continuous batching with paged KV by transformers, for a model of the same shape."""

from __future__ import annotations

import inspect
import itertools
import statistics
import time
from typing import Any

import torch
from gpu_clock import Times

from decoder.model_config import ModelConfig


class Absent(Exception):  # noqa: N818
    """transformers has no continuous batching, or it does not run here. The message gives the reason."""


class Peer:
    """A Llama of the same shape with random weights, run by `generate_batch`."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        try:
            import transformers
            from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
        except ImportError as error:
            raise Absent(f"transformers cannot be imported: {error}") from error
        self.version = transformers.__version__
        transformers.logging.set_verbosity_error()
        if not hasattr(LlamaForCausalLM, "generate_batch"):
            raise Absent(f"transformers {self.version} has no continuous batching (generate_batch)")
        shape = LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.ffn_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_positions,
            rms_norm_eps=config.rms_eps,
            rope_theta=config.rope_theta,
            tie_word_embeddings=False,
        )
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                self.model = LlamaForCausalLM(shape).eval()
        finally:
            torch.set_default_dtype(before)
        self.vocab_size, self.device = config.vocab_size, device
        self._generation_config = GenerationConfig

    def decode_times(self, batch: int, context: int, new_tokens: int) -> tuple[Times, str]:
        """Return the seconds between tokens while the whole batch decodes, and how they were measured."""
        generator = torch.Generator().manual_seed(batch)
        prompts = torch.randint(1, self.vocab_size, (batch, context), generator=generator).tolist()
        config = self._generation_config(
            max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cache=True
        )
        parameters = inspect.signature(self.model.generate_batch).parameters
        options: dict[str, Any] = {"record_timestamps": True} if "record_timestamps" in parameters else {}
        if self.device.type == "cpu" and "continuous_batching_config" in parameters:
            # The default cache would use all of the host's memory, and take minutes to allocate.
            from transformers.generation.configuration_utils import ContinuousBatchingConfig

            small = ContinuousBatchingConfig(page_size=32, num_blocks=4 * batch, max_batch_tokens=64)
            options["continuous_batching_config"] = small
        try:
            started = time.perf_counter()
            results = self.model.generate_batch(prompts, generation_config=config, **options)
            seconds = time.perf_counter() - started
        except Exception as error:  # no error of the peer ends the run
            raise Absent(f"transformers {self.version}: generate_batch failed: {error!r}"[:400]) from error
        outputs = list(results.values())
        if len(outputs) != batch or any(len(each.generated_tokens) != new_tokens for each in outputs):
            lengths = [len(each.generated_tokens) for each in outputs]
            raise Absent(f"transformers {self.version}: of {batch} texts of {new_tokens} tokens came {lengths}")
        stamps = [getattr(each, "timestamps", None) for each in outputs]
        if any(each is None or len(each) < new_tokens for each in stamps):
            return Times((seconds / new_tokens,)), "whole run with its prefill, over its tokens"
        # Step i ends when the last text has its i-th token. The first steps still prefill some texts.
        all_in = max(each[0] for each in stamps)
        ends = [max(each[index] for each in stamps) for index in range(new_tokens)]
        gaps = [later - end for end, later in itertools.pairwise(ends) if end >= all_in]
        if len(gaps) < new_tokens // 4 or statistics.median(gaps) <= 0:
            return Times((seconds / new_tokens,)), "whole run with its prefill, over its tokens"
        return Times(tuple(gaps)), "gaps between tokens once all texts decode"
