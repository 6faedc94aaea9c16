"""Compiles the kernels for a GPU that need not be there, and prints each one's registers and spills as JSON.

Run as a program, without TRITON_INTERPRET: Triton decides at its import which of the two it does.
"""

import json
import re
import subprocess
import sys
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from libsym.abi import PAGE_ENTRIES
from triton_kernels import paged_decode_attention as attention
from triton_kernels import rmsnorm

ELEMENT = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# (query heads, KV heads, head_dim, element): SmolLM2-135M, Llama-3-8B, Gemma's widest head, the reference's precision.
ATTENTION_SHAPES = [
    (9, 3, 64, "bf16"),
    (9, 3, 64, "fp16"),
    (32, 8, 128, "bf16"),
    (4, 1, 256, "bf16"),
    (9, 3, 64, "fp32"),
]
NORM_SHAPES = [(576, "bf16"), (4096, "bf16"), (16384, "bf16")]


def compile_kernel(kernel, signature, constants, capability, **options):
    """Registers a thread, bytes of stack that they spill to, and whether the PTX uses the matrix unit."""
    types = dict.fromkeys(constants, "constexpr") | signature
    # What Triton finds at run time: torch's memory is aligned to 16 bytes, strides of whole heads are multiples of 16.
    aligned = [
        name for name in kernel.arg_names if types[name][0] == "*" or (name.endswith("_stride") and "table" not in name)
    ]
    attrs = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    ordered = {name: types[name] for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=ordered, constexprs=constants, attrs=attrs)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": True} | options
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    return {"registers": int(registers), "spilled": int(stack), "matrix_unit": "mma" in compiled.asm["ptx"]}


def compile_attention(num_heads, num_kv_heads, head_dim, element, capability):
    shape = attention.launch_shape(num_heads, num_kv_heads, head_dim, ELEMENT[element])
    pages = dict.fromkeys(("query_ptr", "key_ptr", "value_ptr"), f"*{element}")
    partial = dict.fromkeys(("partial_ptr", "log2_weight_ptr"), "*fp32")
    lists = dict.fromkeys(("page_table_ptr", "length_ptr"), "*i32")
    strides = ("query_batch", "query_head", "page", "kv_head", "entry", "table_batch")
    numbers = {f"{name}_stride": "i32" for name in strides} | {"num_heads": "i32", "num_splits": "i32"}
    width = {"HEAD_DIM": shape.head_dim, "HEAD_LANES": shape.head_lanes}
    split = {"PAGE": PAGE_ENTRIES, "PAGES_PER_SPLIT": attention.SPLIT_PAGES}
    yield (
        "attend",
        compile_kernel(
            attention._attend_split_kernel,
            pages | partial | lists | numbers | {"scale_log2": "fp32"},
            width | split | {"GROUP": shape.group, "GROUP_ROWS": shape.group_rows},
            capability,
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        ),
    )
    yield (
        "merge",
        compile_kernel(
            attention._merge_splits_kernel,
            partial | {"length_ptr": "*i32", "out_ptr": f"*{element}", "num_heads": "i32", "num_splits": "i32"},
            width | {"SPLIT_ENTRIES": attention.SPLIT_PAGES * PAGE_ENTRIES},
            capability,
            num_warps=1,
        ),
    )


def compile_norm(hidden_size, element, capability):
    rows = dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "out_ptr", "new_residual_ptr"), f"*{element}")
    numbers = {"x_row_stride": "i32", "residual_row_stride": "i32", "hidden_size": "i32", "eps": "fp32"}
    constants = {"ADD_RESIDUAL": True, "BLOCK": rmsnorm.block_size(hidden_size)}
    warps = rmsnorm.num_warps(hidden_size)
    return compile_kernel(rmsnorm._rmsnorm_kernel, rows | numbers, constants, capability, num_warps=warps)


def main(capability):
    report = {}
    for num_heads, num_kv_heads, head_dim, element in ATTENTION_SHAPES:
        for part, figures in compile_attention(num_heads, num_kv_heads, head_dim, element, capability):
            report[f"{part} {num_heads}/{num_kv_heads}x{head_dim} {element}"] = figures
    for hidden_size, element in NORM_SHAPES:
        report[f"rmsnorm {hidden_size} {element}"] = compile_norm(hidden_size, element, capability)
    print(json.dumps(report))


if __name__ == "__main__":
    main(int(sys.argv[1]))
