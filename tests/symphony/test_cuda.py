"""A daemon on `--device cuda`, its kernels in Triton's interpreter: real programs, the real mount."""

import json
import os

import pytest
import torch

from decoder.cuda.device import Device
from decoder.cuda.memory_plan import plan_memory
from decoder.model import load_model
from decoder.tiny import tiny_config
from libsym.errors import Invalid, NoSpace
from symphony.daemon.backends import build_backend
from symphony.settings.loading import load

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

PROGRAM = """
import json
tokens = list(b"the cat sat on")
with sym.kv_create("a.kv") as kv:
    first = sym.pred(kv, tokens)
    with sym.kv_fork(kv) as fork:
        looped, pending = [], [first.argmax()]
        for _ in range(2):
            looped.append(sym.pred(fork, pending).argmax())
            pending = looped[-1:]
    with sym.kv_fork(kv) as fork:
        generated = list(sym.generate(fork, [first.argmax()], sampler=sym.Sampler.greedy(), max_tokens=2))
print(json.dumps([looped, [int(token) for token in generated]]))
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


@pytest.mark.slow
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
    assert daemon.stop() == 0, daemon.log.read_text()
    assert "Traceback" not in daemon.log.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"device": "tpu"}, "device 'tpu' is not one of cpu, cuda"),
        ({"device": "cuda", "precision": "int8"}, "'int8' is not one of float32, bf16, float16 on a GPU"),
        ({"device": "cuda", "kv_dtype": "float32"}, "'float32' is not one of bf16 .*fp8"),
        ({"gpu_memory": "4G"}, "gpu_memory is for --device cuda"),
        ({"kv_dtype": "fp8"}, "kv_dtype is for --device cuda"),
        ({"invariant": False}, "--no-invariant is for --device cuda"),
    ],
)
def test_options_that_contradict_each_other_are_named(words, message):
    with pytest.raises(OSError, match=message):
        load(None, words)


@pytest.mark.skipif(not INTERPRETED, reason="the options are those of the interpreter")
def test_memory_that_others_took_meanwhile_is_one_line(monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16.06 GiB.")

    monkeypatch.setattr("decoder.cuda.backend.CudaDecoder", full)
    config = load(None, {"device": "cuda", "precision": "float32", "kv_memory": "1M"})
    model = load_model("tiny:layers=1")
    backend = build_backend(config, model)
    assert backend.bits == "cuda interpreter invariant"
    with pytest.raises(NoSpace, match="the GPU's memory ran out: say a smaller --gpu-memory"):
        backend.load(model.weights, lambda: None)
    backend.close()


@pytest.mark.parametrize(
    ("capability", "kv_dtype", "message"),
    [
        ((7, 5), "F16", r"the decoder needs .* 8\.0, Some GPU has 7\.5"),
        ((8, 0), "F8_E4M3", r"--kv-dtype fp8 needs .* 8\.9, Some GPU has 8\.0"),
        ((8, 0), "BF16", None),
        ((9, 0), "F8_E4M3", None),
    ],
)
def test_a_gpu_too_old_for_the_kernels_is_named(monkeypatch, capability, kv_dtype, message):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: capability)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "Some GPU")
    device = Device(torch.device("cuda", 0))
    if message is None:
        device.check_age(kv_dtype)
    else:
        with pytest.raises(Invalid, match=message):
            device.check_age(kv_dtype)
