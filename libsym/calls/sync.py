"""kv_sync: a wait until files survive a power cut."""

from __future__ import annotations

from libsym.abi import Op
from libsym.calls.faces import system_call
from libsym.calls.kv import KV
from libsym.calls.open_file import channel_of
from libsym.channel.scripts import Call, Script


@system_call
def kv_sync(kv: KV | None = None) -> Script[None]:
    """Wait until a file survives a crash of the daemon and a power cut, as fsync(2) does.

    Without `kv`, the call waits for all files.

    The results of all earlier calls on the file survive: entries, names, owner, mode, times, attributes and advice.
    The call does not wait for other files, unless this file took the name of a file that is not durable yet. NoSpace:
    the disk is full. NotSupported: the file is anonymous, and ends with its last handle. After an error the file is
    unchanged in memory, and the next call tries again.

    >>> with sym.kv_create("kept.kv") as kv:
    ...     length = sym.kv_write(kv, [1, 2, 3])
    ...     sym.kv_sync(kv)
    >>> sym.kv_sync()
    >>> sym.kv_remove("kept.kv")
    """
    if kv is not None:
        channel_of(kv, "kv_sync")
    yield Call(Op.KV_SYNC, handle=0 if kv is None else kv.handle)
