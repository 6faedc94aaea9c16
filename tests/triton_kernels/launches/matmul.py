from collections.abc import Iterator
from functools import partial

import torch

from tests.triton_kernels.launches import Launch, meta
from triton_kernels.matmul import matmul

# (num_outputs, num_inputs) of qkv, o, gate and up, down, head: Llama-3-8B, SmolLM2-135M.
LLAMA = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
SMOLLM2 = ((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576))
ROWS = (1, 16, 17, 33, 64, 100, 300, 2048)
ELEMENTS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DEFAULT = {"4096x4096 rows 16 bf16", "4096x4096 rows 64 bf16", "28672x4096 rows 2048 bf16"}


def multiply(rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype, *, bias: bool = False) -> None:
    weight = meta(num_outputs, num_inputs, dtype=dtype)
    out = meta(rows, num_outputs, dtype=torch.float32) if num_outputs > 40000 else None
    matmul(meta(rows, num_inputs, dtype=dtype), weight, bias=meta(num_outputs, dtype=dtype) if bias else None, out=out)


def launches() -> Iterator[Launch]:
    for element, shapes in (("bf16", LLAMA + SMOLLM2), ("fp16", LLAMA), ("fp32", SMOLLM2[2:4])):
        for shape in shapes:
            for rows in ROWS:
                name = f"{shape[0]}x{shape[1]} rows {rows} {element}"
                launch = partial(multiply, rows, *shape, ELEMENTS[element])
                yield Launch(name, launch, default=name in DEFAULT, may_spill=element == "fp32" or rows > 1024)
    for rows in ROWS:  # Qwen2's products have a bias
        yield Launch(f"4608x3584 rows {rows} bf16 bias", partial(multiply, rows, 4608, 3584, torch.bfloat16, bias=True))
