"""A daemon on `--device cuda`, its kernels in Triton's interpreter: real programs, the real mount."""

import json
import os

import pytest
import torch

from decoder.cuda.memory_plan import plan_memory
from decoder.tiny import tiny_config

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

PROGRAM = """
import json
with sym.kv_create("a.kv") as kv:
    pending = [sym.pred(kv, list(b"the cat sat on")).argmax()]
    with sym.kv_fork(kv) as fork:
        looped = [sym.pred(fork, pending).argmax()]
    with sym.kv_fork(kv) as fork:
        generated = list(sym.generate(fork, pending, max_tokens=1))
print(json.dumps([looped, generated]))
"""

SWAP = """
import json
def after(path):
    with sym.kv_open(path) as kv, sym.kv_fork(kv) as fork:
        return list(sym.pred(fork, [7]).logits)
before = after("a.kv")
copied, imported = after("b.kv"), after("c.kv")
with sym.kv_open("a.kv") as kv:
    with sym.kv_merge([kv] * 150, rebase=False) as large:
        pages = -(-large.len() // 32)
print(json.dumps([before == copied == imported, pages, before == after("a.kv")]))
"""


@pytest.mark.skipif(not INTERPRETED, reason="the options are those of the interpreter")
def test_programs_forks_copies_and_images_work_and_pages_come_back_from_the_host(start_daemon, tmp_path):
    plan = plan_memory(tiny_config(num_layers=1), torch.float32, "F32", 1 << 30)
    gpu_memory = plan.weight_bytes + plan.workspace_bytes + 64 * plan.page_bytes
    model = ("--model", "tiny:layers=1", "--kv-memory", "8M", "--precision", "float32")
    daemon = start_daemon(*model, "--device", "cuda", "--gpu-memory", str(gpu_memory))
    looped, generated = json.loads(daemon.run(PROGRAM))
    assert looped == generated
    daemon.shell(f"cp {daemon.mount}/a.kv {daemon.mount}/b.kv")
    daemon.shell(f"cp {daemon.mount}/a.kv {tmp_path}/a.kv && cp {tmp_path}/a.kv {daemon.mount}/c.kv")
    same, num_pages, same_again = json.loads(daemon.run(SWAP))
    assert same
    assert same_again
    stat = daemon.stat()
    assert stat["num_frames"] == 64 < num_pages
    assert stat["num_pages_out"] > 0
