"""What `.symphony` shows: the model, the state of the daemon, each program; and how texts become KV.

Satisfies kvfs's `ControlFiles`, by structure.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from decoder.batch import IntArray
from decoder.text.cuts import Cut
from kvfs.control.sources import Process
from kvfs.fs import FileSystem, OpenKv
from libsym.abi import Op
from libsym.errors import NotFound, SymError
from scheduler.batch.accounting import STEP_SIZES, Usage
from scheduler.batch.batch_scheduler import BatchScheduler
from scheduler.batch.prefill import TextPrefill
from scheduler.connection.lip import Lip
from scheduler.gate import Gate
from scheduler.operations.text import TextModel
from scheduler.status import metrics
from scheduler.status.held import BOUNDS_S, HeldTimes


class TextSource(TextModel, Protocol):
    """What the text view asks of the model, beside what the gate does."""

    @property
    def token_texts(self) -> Sequence[bytes]:
        """The bytes that each token stands for, by its number."""
        ...

    def cut(self, text: str) -> Cut | None:
        """Where the beginning of a text may be tokenized, whatever follows."""
        ...


class Control:
    """The facts behind the control files of one daemon."""

    def __init__(
        self,
        fs: FileSystem,
        batches: BatchScheduler,
        gate: Gate,
        lips: Callable[[], Iterable[Lip]],
        text: TextSource,
        held: HeldTimes,
    ) -> None:
        """`lips`: every program that is connected now."""
        self._fs = fs
        self._batches = batches
        self._gate = gate
        self._lips = lips
        self._text = text
        self._held = held
        self._began_s = time.monotonic()
        self._token_texts = text.token_texts
        self.token_lengths: IntArray = np.array([len(text) for text in self._token_texts], np.int32)

    # Facts

    def model(self) -> str:
        """`key: value`, a line each."""
        info = self._text.info()
        facts = {
            "name": info["name"],
            "architecture": info["architecture"],
            "vocabulary": info["vocab_size"],
            "context": info["max_positions"],
            "layers": info["num_layers"],
            "hidden_size": info["hidden_size"],
            "backend": info["backend"],
            "kv_type": info["dtype"],
            "kv_bytes_per_token": info["entry_bytes"],
            "page_entries": info["page_entries"],
            "page_bytes": self._fs.pool.page_bytes,
        }
        identity = self._fs.volume.model.identity
        facts |= {f"{key}_fingerprint": identity[key] for key in ("model", "tokenizer")}
        facts |= {key: value for key, value in identity.items() if key not in {"model", "tokenizer"}}
        return _lines(facts)

    def metrics(self) -> str:
        """Everything that is counted, in Prometheus's text format."""
        steps, pool, volume = self._batches.statistics, self._fs.pool.statistics(), self._fs.statfs()
        kept = self._fs.volume.storage.statistics()
        gauge, counter, counters = metrics.gauge, metrics.counter, metrics.counters
        taken = self._gate.num_calls + Counter({Op.PRED: steps.num_taken_calls})
        calls = {op.name.lower(): count for op, count in sorted(taken.items())}
        return metrics.exposition(
            (
                gauge("symphony_model_info", "The model, as a label.", 1, {"name": self._fs.volume.model.name}),
                gauge("symphony_uptime_seconds", "Time since the daemon started.", time.monotonic() - self._began_s),
                gauge("symphony_weights_loaded", "1 when steps can be computed.", int(self._batches.has_decoder)),
                gauge("symphony_pages", "Pages of the pool.", pool.num_pages),
                gauge("symphony_pages_free", "Pages that nobody refers to.", pool.num_free),
                gauge("symphony_pages_shared", "Pages with more than one reference.", pool.num_shared),
                gauge("symphony_page_bytes", "Bytes of a page.", pool.page_bytes),
                gauge("symphony_files", "Files of any kind, directories included.", volume.num_files),
                gauge("symphony_names", "Names in all directories.", volume.num_names),
                gauge("symphony_kv_versions", "KV files and open older versions.", self._fs.volume.num_kv_versions),
                gauge("symphony_disk_bytes", "What pages and plain files take on disk.", kept.disk_bytes),
                gauge(
                    "symphony_unsynced_files", "Files of which something is in memory alone.", kept.num_unsynced_files
                ),
                gauge("symphony_unsynced_bytes", "Pages of named files in memory alone.", kept.unsynced_bytes),
                gauge("symphony_disk_fails", "1 when the last commit or write failed.", int(bool(kept.error))),
                counter("symphony_commits_total", "Commits of the index.", kept.num_commits),
                counter("symphony_disk_written_bytes_total", "Pages written to disk.", kept.written_bytes),
                counter("symphony_disk_read_bytes_total", "Pages read from disk.", kept.read_bytes),
                gauge("symphony_lips", "Programs that are connected.", sum(1 for _ in self._lips())),
                counters("symphony_system_calls_total", "System calls taken, by operation.", "op", calls),
                gauge("symphony_queue_calls", "Calls of pred() waiting or running.", self._batches.num_waiting),
                counters(
                    "symphony_pred_calls_total",
                    "Calls of pred() and prefills answered.",
                    "result",
                    {"ok": steps.num_calls - steps.num_failed_calls, "error": steps.num_failed_calls},
                ),
                counter("symphony_pred_queue_seconds_total", "Time that calls waited.", steps.queue_s),
                counter("symphony_steps_total", "Steps computed.", steps.num_steps),
                counter("symphony_step_seconds_total", "Time in steps.", steps.step_s),
                counters(
                    "symphony_tokens_total",
                    "Tokens computed.",
                    "phase",
                    {"prefill": steps.num_prefill_tokens, "decode": steps.num_tokens - steps.num_prefill_tokens},
                ),
                metrics.histogram(
                    "symphony_step_calls",
                    "Calls in a step.",
                    STEP_SIZES,
                    steps.num_steps_by_size,
                    steps.num_calls_in_steps,
                ),
                metrics.histogram(
                    "symphony_trio_held_seconds",
                    "Times that one task held the daemon's main thread without a break.",
                    BOUNDS_S,
                    self._held.nums,
                    self._held.total_s,
                ),
            )
        )

    def processes(self) -> Mapping[int, Process]:
        """Every connected program; of several connections of one process, the first says whose it is."""
        found: dict[int, Process] = {}
        for lip in sorted(self._lips(), key=lambda lip: lip.since_ns):
            found.setdefault(lip.pid, Process(lip.credentials.uid, lip.credentials.gid, lip.since_ns))
        return found

    def status(self, pid: int) -> str:
        """One program's state, as in `/proc/PID/status`."""
        process = self.processes().get(pid)
        if process is None:
            raise NotFound(f"process {pid} is not connected any more")
        # A connection that the process made under another uid is not its owner's affair.
        lips = [lip for lip in self._lips() if lip.pid == pid and lip.credentials.uid == process.uid]
        files = [file for lip in lips for file in lip.handles.values()]
        usage = sum((self._batches.usage_of(lip) for lip in lips), Usage())
        facts = {
            "name": _command(pid),
            "pid": pid,
            "uid": process.uid,
            "gid": process.gid,
            "connections": len(lips),
            "handles": len(files),
            "pages": self._num_pages(files),
            "calls": usage.num_calls,
            "failed_calls": usage.num_failed_calls,
            "tokens": usage.num_tokens,
            "rejected_tokens": usage.num_rejected,
            "queue_seconds": f"{usage.queue_s:.6f}",
            "compute_seconds": f"{usage.compute_s:.6f}",
            "page_seconds": f"{sum(lip.page_seconds.total() for lip in lips):.6f}",
        }
        return _lines(facts)

    def _num_pages(self, files: Iterable[OpenKv]) -> int:
        """Distinct pages of some open files."""
        is_held = np.zeros(self._fs.pool.num_numbers, np.bool_)
        for file in files:
            is_held[file.table.pages] = True
        return int(np.count_nonzero(is_held))

    # Texts

    def text_bytes(self, tokens: Sequence[int]) -> bytes:
        """The text of tokens."""
        return b"".join([self._token_texts[token] for token in tokens])

    def num_hidden_bytes(self, first_token: int) -> int:
        """1 where the family puts a space in front of every text and takes it away again."""
        is_spaced = self._token_texts[first_token].startswith(b" ")
        return int(is_spaced and not self._text.decode([first_token]).startswith(" "))

    def tokenize(self, text: str, *, is_whole: bool) -> tuple[list[int], str]:
        """The tokens of a text as `sym.tokenize` gives them, and what has to wait for what follows."""
        cut = Cut(len(text), len(text)) if is_whole else self._text.cut(text)
        if cut is None:
            return [], text
        return self._text.encode(text[: cut.end], special=True), text[cut.resume :]

    def prefill(self, file: OpenKv, pid: int, failed: Callable[[SymError], None]) -> TextPrefill:
        """Begin to append to a file."""
        return TextPrefill(self._batches, file, pid, failed)


def _lines(facts: Mapping[str, object]) -> str:
    """`key: value` lines; a value may come from a checkpoint or a program, and stays on its line."""
    width = max(map(len, facts)) + 1
    lines = []
    for key, value in facts.items():
        text = "".join(each if each.isprintable() else "?" for each in str(value))
        lines.append(f"{key + ':':<{width}} {text}\n")
    return "".join(lines)


def _command(pid: int) -> str:
    """The name of a process's program, as `ps` shows it; nothing when it has gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return ""
