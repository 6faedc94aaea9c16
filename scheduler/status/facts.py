"""Contents of `.symphony`: the model, the daemon's state, each program; and prefill of texts that programs write.

`Control` implements the protocol `ControlFiles` of kvfs.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from decoder.batch import IntArray
from decoder.text.cuts import TextCut
from kvfs.control.sources import ConnectedProgram
from kvfs.fs import FileSystem, OpenKv
from kvfs.pages.accounts import FIRST_DOMAIN
from libsym.abi import Op
from libsym.errors import NotFound, SymError
from scheduler.batch.accounting import STEP_SIZES, TIME_BOUNDS_S, Times
from scheduler.batch.batch_scheduler import BatchScheduler
from scheduler.batch.prefill import TextPrefill
from scheduler.doors.gate import Gate
from scheduler.operations.program_facts import ProgramFacts
from scheduler.operations.text import TextModel
from scheduler.programs.registry import Programs
from scheduler.programs.used import Used
from scheduler.status import metrics
from scheduler.status.held import BOUNDS_S, HeldTimes
from scheduler.status.metrics import Metric


class TextSource(TextModel, Protocol):
    """Facts of the model that the text view needs, in addition to the facts that the gate needs."""

    @property
    def token_texts(self) -> Sequence[bytes]:
        """Bytes of each token, by its id."""
        ...

    def cut(self, text: str) -> TextCut | None:
        """Return where a text can be cut: the tokens before the cut are the same whatever text follows."""
        ...


class Control:
    """Facts behind the control files of one daemon."""

    def __init__(
        self,
        fs: FileSystem,
        batches: BatchScheduler,
        gate: Gate,
        programs: Programs,
        text: TextSource,
        held: HeldTimes,
        more: Callable[[], Sequence[Metric]] = tuple,
    ) -> None:
        """`more`: metrics of parts above the scheduler."""
        self._fs = fs
        self._batches = batches
        self._gate = gate
        self._programs = programs
        self._program_facts = ProgramFacts(batches)
        self._processes: tuple[int, dict[int, ConnectedProgram]] = (-1, {})
        """The version of `programs` at the last listing, and the processes in that listing."""
        self._text = text
        self._held = held
        self._more = more
        self._began_s = time.monotonic()
        self._token_texts = text.token_texts
        self.token_lengths: IntArray = np.array([len(text) for text in self._token_texts], np.int32)

    # Facts

    def models(self) -> list[bytes]:
        """Return the names of the served models, as names of files."""
        return [os.fsencode(each.name.replace("/", "_")) for each in self._gate.models]

    def model(self, number: int) -> str:
        """Return the facts of a model as lines of `key: value`."""
        info = self._gate.models.numbered(number).text.info()
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
        """Return all metrics in Prometheus's text format."""
        steps, pool, volume = self._batches.statistics, self._fs.pool, self._fs.statfs()
        kept = self._fs.volume.storage.statistics()
        gauge, counter, counters = metrics.gauge, metrics.counter, metrics.counters
        taken = self._gate.num_calls + Counter({Op.PRED: steps.num_taken_calls})
        calls = {op.name.lower(): count for op, count in sorted(taken.items())}
        return metrics.exposition(
            (
                gauge("symphony_model_info", "The model, as a label.", 1, {"name": self._fs.volume.model.name}),
                gauge("symphony_uptime_seconds", "Time since the daemon started.", time.monotonic() - self._began_s),
                gauge("symphony_weights_loaded", "1 when steps can be computed.", int(self._batches.has_decoder)),
                gauge("symphony_pages", "Maximum number of pages, in memory or on disk.", pool.num_pages),
                gauge("symphony_pages_free", "Pages without a reference.", pool.num_free),
                *self._tier_metrics(),
                gauge("symphony_pages_shared", "Pages with more than one reference.", pool.num_shared),
                gauge("symphony_page_bytes", "Bytes of a page.", pool.page_bytes),
                gauge("symphony_files", "Files of any kind, directories included.", volume.num_files),
                gauge("symphony_names", "Names in all directories.", volume.num_names),
                gauge("symphony_kv_versions", "KV files and open older versions.", self._fs.volume.num_kv_versions),
                gauge("symphony_disk_bytes", "Bytes of pages and plain files on disk.", kept.disk_bytes),
                gauge(
                    "symphony_unsynced_files", "Files with changes that are only in memory.", kept.num_unsynced_files
                ),
                gauge("symphony_unsynced_bytes", "Bytes of named files in memory alone.", kept.unsynced_bytes),
                gauge("symphony_lost_files", "KV files that lost entries and are not truncated.", kept.num_lost_files),
                gauge("symphony_disk_fails", "1 when the last commit or write failed.", int(bool(kept.error))),
                counter("symphony_commits_total", "Commits of the index.", kept.num_commits),
                counter("symphony_disk_written_bytes_total", "Pages written to disk.", kept.written_bytes),
                counter("symphony_disk_read_bytes_total", "Pages read from disk.", kept.read_bytes),
                *self._program_metrics(),
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
                _times("symphony_step_duration_seconds", "How long steps took.", steps.step_times),
                _times(
                    "symphony_stretch_duration_seconds",
                    "Time from the request for a pred(), or for a token of generate(), until it was computed.",
                    steps.stretch_times,
                ),
                _times("symphony_stretch_wait_seconds", "Time of stretches outside of steps.", steps.wait_times),
                metrics.histogram(
                    "symphony_trio_held_seconds",
                    "Times that one task held the daemon's main thread without a break.",
                    BOUNDS_S,
                    self._held.nums,
                    self._held.total_s,
                ),
                *self._more(),
            )
        )

    def _tier_metrics(self) -> list[Metric]:
        """Return the metrics of the tiers: the places of pages, and the numbers of moved pages."""
        tiers, gauge, counter = self._fs.volume.pager.statistics(), metrics.gauge, metrics.counter
        moved = {"in": tiers.num_in, "out": tiers.num_out, "dropped": tiers.num_dropped}
        return [
            gauge("symphony_frames", "Frames: maximum number of pages in memory.", tiers.num_frames),
            gauge("symphony_frames_free", "Frames that hold no page.", tiers.num_free_frames),
            gauge("symphony_pages_computing", "Pages in memory that calls need there now.", tiers.num_computing),
            gauge("symphony_pages_pinned", "Pages that advice keeps in memory.", tiers.num_kept),
            gauge("symphony_pages_on_disk_alone", "Pages that are not in memory.", tiers.num_on_disk_alone),
            metrics.counters(
                "symphony_pages_moved_total",
                "Pages read from disk, written to make room, and dropped from memory.",
                "way",
                moved,
            ),
            gauge("symphony_calls_waiting_for_pages", "Calls whose pages are not in memory yet.", tiers.num_waiting),
            counter("symphony_page_waits_total", "Calls that had to wait for pages.", tiers.num_waits),
            counter("symphony_page_wait_seconds_total", "Time that calls waited for pages.", tiers.wait_s),
            metrics.counters(
                "symphony_resumes_total",
                "Files used again after pages had left memory, by whether the pages were back in time.",
                "hidden",
                {"yes": tiers.num_hidden, "no": tiers.num_resumes - tiers.num_hidden},
            ),
            counter("symphony_preemptions_total", "Calls that left to free memory.", tiers.num_preempted),
        ]

    def _program_metrics(self) -> list[Metric]:
        """Return metrics of programs, and of the usage of users and domains."""
        programs = self._programs
        users = {str(uid): used for uid, used in programs.users.items()}
        domains = {str(number - FIRST_DOMAIN): used for number, used in self._batches.domains().items()}
        num_refused = programs.admission.num_refused
        num_connections = sum(len(each.connections) for each in programs.with_pids())
        return [
            metrics.gauge("symphony_lips", "Connections of programs.", num_connections),
            metrics.gauge("symphony_programs", "Programs that live.", len(programs)),
            metrics.counter("symphony_programs_refused_total", "Programs that were refused.", num_refused),
            *_usage_metrics("user", "By uid", users),
            *_usage_metrics("user", "By uid, as seen within the last second", users, _MEASURED),
            *_usage_metrics("domain", "By domain, numbered as they were made", domains),
        ]

    def processes(self) -> Mapping[int, ConnectedProgram]:
        """Return the processes of programs by pid.

        If one process has several programs, its user is that of the first program.
        """
        version, found = self._processes
        if version != self._programs.version:
            found = {}
            for program in self._programs.with_pids():
                if program.pid is not None:
                    found.setdefault(program.pid, ConnectedProgram(program.uid, program.gid, program.began_ns))
            self._processes = self._programs.version, found
        return found

    def status(self, pid: int) -> str:
        """Return one program's state, as in `/proc/PID/status`."""
        program = next((each for each in self._programs.with_pids() if each.pid == pid), None)
        if program is None:
            raise NotFound(f"process {pid} is no program any more")
        self._batches.sync()
        program.measure()
        facts = self._program_facts.of(program, self._program_facts.states())
        shown: dict[str, object] = {
            "name": program.name,
            "id": program.id,
            "pid": pid,
            "uid": program.uid,
            "gid": program.gid,
            "parent": program.parent or "",
            "started": f"{facts['started']:.3f}",
            "connections": len(program.connections),
            "state": facts.get("state", "ended"),
            "call": facts.get("call") or "",
            "handles": program.num_handles,
            "pages": program.page_seconds.num_distinct_pages(),
            **{name: f"{value:.6f}" if isinstance(value, float) else value for name, value in _shown(program.used)},
            **{f"limit_{name}": value for name, value in program.limits.facts().items()},
        }
        return _lines(shown)

    # Texts

    def text_bytes(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes of the tokens' text."""
        return b"".join([self._token_texts[token] for token in tokens])

    def num_hidden_bytes(self, first_token: int) -> int:
        """Return 1 if the tokenizer adds a space before each text and removes the space when it decodes, else 0."""
        is_spaced = self._token_texts[first_token].startswith(b" ")
        return int(is_spaced and not self._text.decode([first_token]).startswith(" "))

    def tokenize(self, text: str, *, is_whole: bool) -> tuple[list[int], str]:
        """Return a text's tokens as `sym.tokenize` does, and the end of the text, which must wait for more text."""
        cut = TextCut(len(text), len(text)) if is_whole else self._text.cut(text)
        if cut is None:
            return [], text
        return self._text.encode(text[: cut.end], special=True), text[cut.resume :]

    def prefill(self, file: OpenKv, pid: int, failed: Callable[[SymError], None]) -> TextPrefill:
        """Begin to append tokens to a file for the process that writes it."""
        program = self._programs.join_guest(pid, file.inode.uid)
        left = partial(self._programs.leave_guest, program)
        return TextPrefill(self._batches, file, pid, program, failed, left)


def _times(name: str, words: str, times: Times) -> Metric:
    return metrics.histogram(name, words, TIME_BOUNDS_S, times.nums, times.total_s)


def _lines(facts: Mapping[str, object]) -> str:
    """Return lines of `key: value`. Values from checkpoints and programs may have line breaks, which become `?`."""
    width = max(map(len, facts)) + 1
    lines = []
    for key, value in facts.items():
        text = "".join(each if each.isprintable() else "?" for each in str(value))
        lines.append(f"{key + ':':<{width}} {text}\n")
    return "".join(lines)


_NAMES = {"queue_s": "queue_seconds", "compute_s": "compute_seconds"}
"""Names in a status file that differ from the names in `Used`."""


def _shown(used: Used) -> list[tuple[str, float]]:
    return [(_NAMES.get(name, name), value) for name, value in used.facts().items()]


def _usage_metrics(
    label: str, which: str, users: Mapping[str, Used], what: Mapping[str, str] | None = None
) -> list[Metric]:
    """Return one counter for each kind of usage, or no counter if there are no users."""
    if not users:
        return []
    found = []
    for name, words in (what or _USAGE).items():
        values = {key: getattr(used, name) for key, used in users.items()}
        unit = _NAMES.get(name, name)
        found.append(metrics.counters(f"symphony_{label}_{unit}_total", f"{which}: {words}.", label, values))
    return found


_USAGE = {
    "calls": "calls that run the model",
    "failed_calls": "failed calls that run the model",
    "tokens": "tokens computed",
    "tokens_in": "tokens passed to calls",
    "tokens_out": "tokens and rows in answers to calls",
    "steps": "steps that computed calls",
    "queue_s": "time that calls waited for a step",
    "compute_s": "time of the steps that computed calls",
}
_MEASURED = {
    "page_seconds": "pages of open files, times seconds",
    "bytes_in": "bytes of requests",
    "bytes_out": "bytes of replies",
}
"""Usage that is measured only when it is read. Domains do not have this usage."""
