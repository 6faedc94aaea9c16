"""Names that are claimed for files to be computed: which files are given one."""

import errno

from libsym.abi import OPEN_WRITE, Op
from libsym.channel.server import Request


def test_a_file_without_a_claim_is_given_no_name(bench):
    lip = bench.lip()
    handle = lip.add(bench.file())
    bench.gate.handle(lip, Request(Op.KV_NAME, OPEN_WRITE, 1, handle, (0, 0, 0, 0), b""), None)
    ((_, _, error),) = lip.channel.replies[1]
    assert (error.errno, "has claimed no name" in str(error)) == (errno.EINVAL, True)
