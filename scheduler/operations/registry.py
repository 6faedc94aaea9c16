"""The table of all operations. Add a line here for a new subject.

Add a line to a subject's table for a new system call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvfs.fs import FileSystem
from libsym.abi import Op
from scheduler.batch.batch_scheduler import BatchScheduler
from scheduler.operations.advice import Advising
from scheduler.operations.assemble import Assembler
from scheduler.operations.changes import Changes
from scheduler.operations.children import Children
from scheduler.operations.claims import Claiming
from scheduler.operations.closing import Closing
from scheduler.operations.directories import Listing
from scheduler.operations.du import DiskUsage
from scheduler.operations.fetching import Fetching, Others
from scheduler.operations.generate import Generating
from scheduler.operations.hot import Hot
from scheduler.operations.kv import KvFiles
from scheduler.operations.locks import Locking
from scheduler.operations.messages import Mail
from scheduler.operations.models import Choosing, Models
from scheduler.operations.names import Names
from scheduler.operations.operation import Operation
from scheduler.operations.pred import Predicting
from scheduler.operations.pressure import Pressing
from scheduler.operations.program import SelfRequests
from scheduler.operations.program_facts import ProgramFacts
from scheduler.operations.scrub import Scrubbing
from scheduler.operations.status import Status
from scheduler.operations.sync import Syncing
from scheduler.operations.text import Texts
from scheduler.operations.trace import Tracing
from scheduler.operations.usage import ResourceUsage
from scheduler.programs.registry import Programs


@dataclass(frozen=True, slots=True)
class Operations:
    """Operations by `Op`, and the subjects that the gate tells when programs connect and disconnect."""

    by_op: dict[Op, Operation]
    mail: Mail
    closing: Closing
    generating: Generating
    pressing: Pressing


def all_operations(
    fs: FileSystem,
    batches: BatchScheduler,
    models: Models,
    programs: Programs,
    daemon_info: Callable[[], dict[str, Any]],
    peers: Others,
) -> Operations:
    """Return all operations of one daemon."""
    locking, mail, pressing = Locking(fs), Mail(fs.volume.alarms), Pressing(fs)
    closing, generating = Closing(fs, batches, locking), Generating(batches, models)
    subjects = (
        Status(fs, daemon_info),
        Choosing(models),
        Scrubbing(fs),
        Tracing(fs, batches, models.default.text),
        SelfRequests(fs, batches, mail),
        KvFiles(fs, batches, models),
        closing,
        Names(fs),
        Listing(fs),
        DiskUsage(fs),
        Hot(fs),
        Changes(fs, batches),
        Assembler(fs),
        Fetching(peers),
        locking,
        Claiming(fs, batches, closing),
        Advising(fs),
        Syncing(fs, batches),
        pressing,
        Predicting(batches, lambda file: models.of(file).limited),
        generating,
        Texts(lambda lip: models.of_lip(lip).text),
        mail,
        ResourceUsage(),
        Children(programs, ProgramFacts(batches)),
    )
    by_op: dict[Op, Operation] = {}
    for subject in subjects:
        table = subject.table()
        assert not by_op.keys() & table.keys(), f"{by_op.keys() & table.keys()} have two operations"
        by_op |= table
    return Operations(by_op, mail, closing, generating, pressing)
