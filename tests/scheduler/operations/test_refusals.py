"""Requests that operations refuse: an error in one line, and files, names and slots as they were."""

import errno
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from libsym.abi import MAX_FORKS, OPEN_WRITE, ROWS_LAST, Op
from libsym.channel.server import Request
from scheduler.batch.policy import StepLimits
from tests.kvfs.fakes import commit_all
from tests.scheduler.bench import ME, NUM_SLOTS, Bench

TOKENS = [1, 2, 3]
WRITING, READING, LAST, CLOSED = 1, 2, 3, 4
"""Handles: of a.kv, of a.kv that may only be read, of a file with the last position of the context, and of none."""


class House(Bench):
    """A program with some files beside a plain one. Every refusal must leave them alone."""

    def __init__(self, directory):
        super().__init__(directory, limits=StepLimits())
        self.most = self.model.config.max_positions

    def ask(self, request, uid=0, *, is_confined=False):
        """The error of a request."""
        lip = self.lip(uid)
        if is_confined:
            lip.credentials = replace(lip.credentials, root=self.tree.root)
        answers: Any = lip.channel

        async def scenario():
            file = self.fs.kv_create(ME, "a.kv")
            commit_all(self.fs.reserve(file, TOKENS, range(3)))
            last = self.file()
            commit_all(self.fs.reserve(last, [1], [self.most - 1]))
            for each in (file, self.fs.kv_open(ME, "a.kv", write=False), last):
                lip.add(each)
            self.fs.volume.make_plain(self.tree.root, b"note.txt", 0o600, 0, 0)
            async with trio.open_nursery() as nursery:
                self.gate.handle(lip, request, nursery)
                while request.id not in answers.over:
                    await trio.testing.wait_all_tasks_blocked()
                    await trio.sleep(0.001)
            assert file.table.read()[0].tolist() == TOKENS
            assert last.table.length == 1
            assert sorted(lip.handles) == [WRITING, READING, LAST], "nothing was opened"
            assert sorted(self.tree.root.entries) == [b"a.kv", b"note.txt"], "nothing was made"
            await self.gate.see_off(lip)
            self.fs.kv_remove(ME, "a.kv")
            self.fs.kv_remove(ME, "note.txt")
            assert self.fs.pool.num_free == self.fs.pool.num_pages

        self.run_test(scenario)
        assert len(answers.free) == NUM_SLOTS
        return answers.replies[1][-1][2]


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return House(tmp_path_factory.mktemp("bench"))


def int32(*numbers):
    return np.array(numbers, np.int32).tobytes()


NOTHING = (0o600, 0)
FORMS = ["", "[]", "{}", '{"messages": {}}', '{"messages": [1]}', '{"messages": [], "tools": 1}', '{"messages": [[]]}']
HALVES = [json.dumps({"messages": [{"role": "user", "content": text}]}) for text in ("\ud800", "<eos>\ud800")]
LATER = '{"messages": [1], "after_answer": true}'
LIES = [(1, b""), (-1, b""), (1 << 62, b"x" * 64), (2, b"\xff" * 16)]
COUNTS = [(-1, 1), (-1, 2), (2, -1), (3, -1), (2**62, -(2**62)), (-(2**63), 0)]

REFUSED = [
    # what is asked, by which handle, with what, the error, and words of the message
    (Op.KV_OPEN, 0, (0, 0), b"no/such.kv", errno.ENOENT, "no/such.kv: there is no directory no"),
    (Op.KV_OPEN, 0, (0, 0), b"note.txt", errno.EINVAL, "note.txt"),
    *(
        (Op.KV_OPEN, 0, (0, 0), name, errno.ENOENT, "no such file")
        for name in (b"\x80gone", b"two\nlines", b"\x1b[31m")
    ),
    (Op.KV_CREATE, 0, NOTHING, b"a.kv", errno.EEXIST, "a.kv"),
    (Op.KV_CREATE, 0, NOTHING, b".symphony", errno.EPERM, "symphony"),
    *(
        (op, 0, NOTHING, payload, errno.EINVAL, "there is no model")
        for op, payload in (
            (Op.KV_CREATE, b"new.kv\0large"),
            (Op.KV_CREATE, b"\0\x1b[31m\xff"),
            (Op.MODEL_INFO, b"large"),
            (Op.USE_MODEL, b""),
            (Op.USE_MODEL, b"TINY"),
        )
    ),
    (Op.KV_OPEN, 0, (0, 0), b".symphony/text/a.kv", errno.ENOENT, "symphony"),
    (Op.KV_STAT, 0, (0, 0), b".symphony", errno.ENOENT, "symphony"),
    (Op.KV_RENAME, 0, (0, 0), b'["a.kv", ".symphony"]', errno.EPERM, "symphony"),
    (Op.KV_CREATE, 0, NOTHING, b"none/a.kv", errno.ENOENT, "none"),
    *((Op.KV_CLAIM, 0, (0o600, owner), b"b.kv", errno.EINVAL, "") for owner in (-2, 1 << 32)),
    (Op.KV_FORK, WRITING, NOTHING, b"a.kv", errno.EEXIST, "a.kv"),
    (Op.KV_FORK, WRITING, (0o600, -1), b"", errno.EINVAL, "-1 forks in one call"),
    (Op.KV_FORK, WRITING, (0o600, MAX_FORKS + 1), b"", errno.EINVAL, "forks in one call"),
    (Op.KV_FORK, WRITING, (0o600, 2), b"b.kv", errno.EINVAL, "2 forks can't all be b.kv"),
    *((Op.KV_READ, WRITING, args, b"", errno.EINVAL, "entries from 0 on") for args in ((-1, 0), (0, -1))),
    *((Op.KV_READ, handle, (0, 0), b"", errno.EBADF, "handle") for handle in (0, CLOSED, 104, 2**63)),
    *((op, CLOSED, (0, 0), b"", errno.EBADF, "handle") for op in (Op.KV_CLOSE, Op.KV_LOCK, Op.KV_UNLOCK)),
    (Op.KV_TRUNCATE, WRITING, (4, 0), b"", errno.EINVAL, "the file has 3"),
    (Op.KV_TRUNCATE, WRITING, (-1, 0), b"", errno.EINVAL, "not -1"),
    (Op.KV_TRUNCATE, READING, (0, 0), b"", errno.EBADF, "reading only"),
    (Op.PRED, READING, (1, 0), int32(4), errno.EACCES, "reading"),
    (Op.PRED, CLOSED, (1, 0), int32(4), errno.EBADF, "handle"),
    (Op.PRED, LAST, (1, 0), int32(2), errno.EINVAL, "position"),
    *((Op.PRED, WRITING, (1, 0), int32(token), errno.EINVAL, str(token)) for token in (-1, 100_000, 2**31 - 1)),
    *((Op.PRED, WRITING, (1, 1), int32(1, place), errno.EINVAL, str(place)) for place in (-1, -5, 10**6)),
    *((Op.PRED, WRITING, counts, bytes(4 * max(0, sum(counts))), errno.EINVAL, "") for counts in COUNTS),
    *((Op.KV_EXTRACT, WRITING, (0o600, rows), data, errno.EINVAL, "") for rows, data in LIES),
    *((Op.KV_MERGE, WRITING, (0o600, rows), data, errno.EINVAL, "announced") for rows, data in LIES[:3]),
    (Op.KV_MERGE, 0, (0o600, 2), b"\xff" * 16, errno.EBADF, "handle"),
    (Op.DETOKENIZE, 0, (0, 0), b"abc", errno.EINVAL, "32-bit token ids"),
    (Op.DETOKENIZE, 0, (0, 0), int32(300), errno.EINVAL, "token 300"),
    (Op.FLEET_MACHINES, 0, (0, 0), b'["stop", "east"]', errno.EINVAL, "takes one of '', 'drain'"),
    (Op.FLEET_MACHINES, 0, (0, 0), b'["drain", 7]', errno.EINVAL, "the name of a machine"),
    (Op.FLEET_MACHINES, 0, (0, 0), b'["drain", ""]', errno.ENOENT, "this daemon is in no fleet"),
    (Op.SCRUB, 0, (-1, 0), b"", errno.EINVAL, "-1 bytes a second"),
    (Op.KV_CHANGES, 0, (-1, 0), b"", errno.EINVAL, "no reply gives the place -1, 0"),
    (Op.KV_CHANGES, 0, (0, -1), b"", errno.EINVAL, "no reply gives the place 0, -1"),
    (Op.SCRUB, 0, (0, 0), b"", errno.ENOTSUP, "keeps nothing on disk"),
    *(
        (op, 0, (0, 0), form.encode(), errno.EINVAL, "")
        for op in (Op.CHAT_TEMPLATE, Op.CHAT_TOKENS)
        for form in (*FORMS, *HALVES, LATER)
    ),
]


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: f"{row[0].name}-{row[1]}-{row[2]}-{row[3][:40]!r}")
def test_what_makes_no_sense_is_refused_in_one_line_and_changes_nothing(bench, row):
    op, handle, args, payload, code, words = row
    flags = {Op.PRED: ROWS_LAST, Op.KV_OPEN: OPEN_WRITE}.get(op, 0)
    error = bench.ask(Request(op, flags, 1, handle, (*args, 0, 0), payload))
    assert error.errno == code, error
    assert words in str(error)
    assert str(error).isprintable()
    assert len(str(error)) > 10


@pytest.mark.parametrize("op", [Op.CHECK, Op.SCRUB, Op.TRACE, Op.FLEET_MACHINES])
def test_what_is_for_those_who_run_the_daemon_is_refused_to_others_and_in_domains(bench, op):
    payload = b'["drain", "east"]' if op == Op.FLEET_MACHINES else b""
    request = Request(op, 0, 1, 0, (0, 0, 0, 0), payload)
    for error, words in [
        (bench.ask(request, uid=4242), "uid 4242"),
        (bench.ask(request, is_confined=True), "confined to a domain"),
    ]:
        assert error.errno == errno.EPERM
        assert words in str(error)
