from collections.abc import Iterator
from functools import partial

from tests.triton_kernels.launches import Launch
from tests.triton_kernels.launches._logits import DEFAULT, ROWS, VOCAB_SIZES, logits, settings
from triton_kernels.logits_collect import collect
from triton_kernels.logits_rows import scratch_for


def launches() -> Iterator[Launch]:
    for vocab_size in VOCAB_SIZES:
        yield Launch(str(vocab_size), partial(launch, vocab_size), default=vocab_size == DEFAULT)


def launch(vocab_size) -> None:
    collect(logits(vocab_size), settings(), scratch_for(ROWS, vocab_size, "meta"))
