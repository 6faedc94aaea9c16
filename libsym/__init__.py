"""libsym: the system calls of Symphony, for programs that call a language model.

    import libsym as sym

    kv = sym.kv_create()
    tokens = sym.tokenize("Once upon a time")
    for _ in range(32):
        tokens = [sym.pred(kv, tokens).argmax()]
        sym.send_to_user(sym.detokenize(tokens))

Functions may be called from any thread. What fails raises a `SymError`, which is an `OSError` with an errno. The
daemon is found through SYMPHONY_SOCKET or at its default place; a process connects with its first call.
"""

from libsym.api import (
    close,
    connect,
    daemon_check,
    daemon_stat,
    kv_chmod,
    kv_close,
    kv_create,
    kv_du,
    kv_extract,
    kv_fork,
    kv_list,
    kv_lock,
    kv_merge,
    kv_open,
    kv_read,
    kv_remove,
    kv_rename,
    kv_stat,
    kv_truncate,
    kv_unlock,
    kv_write,
    model_info,
    pred,
    send_to_user,
)
from libsym.dist import Dist
from libsym.errors import (
    BadHandle,
    Busy,
    CrossDevice,
    Exists,
    Invalid,
    IsDirectory,
    NameTooLong,
    NoAccess,
    NoBuffers,
    NoSpace,
    NotConnected,
    NotDirectory,
    NotEmpty,
    NotFound,
    NotPermitted,
    NotSupported,
    OverQuota,
    ProtocolError,
    StepFailed,
    SymError,
    TooLarge,
    TooManyLinks,
    WouldBlock,
)
from libsym.info import KvEntry, KvStat, ModelInfo
from libsym.kv import KV
from libsym.text import Detokenizer, chat_template, detokenize, tokenize

__all__ = [
    "KV",
    "BadHandle",
    "Busy",
    "CrossDevice",
    "Detokenizer",
    "Dist",
    "Exists",
    "Invalid",
    "IsDirectory",
    "KvEntry",
    "KvStat",
    "ModelInfo",
    "NameTooLong",
    "NoAccess",
    "NoBuffers",
    "NoSpace",
    "NotConnected",
    "NotDirectory",
    "NotEmpty",
    "NotFound",
    "NotPermitted",
    "NotSupported",
    "OverQuota",
    "ProtocolError",
    "StepFailed",
    "SymError",
    "TooLarge",
    "TooManyLinks",
    "WouldBlock",
    "chat_template",
    "close",
    "connect",
    "daemon_check",
    "daemon_stat",
    "detokenize",
    "kv_chmod",
    "kv_close",
    "kv_create",
    "kv_du",
    "kv_extract",
    "kv_fork",
    "kv_list",
    "kv_lock",
    "kv_merge",
    "kv_open",
    "kv_read",
    "kv_remove",
    "kv_rename",
    "kv_stat",
    "kv_truncate",
    "kv_unlock",
    "kv_write",
    "model_info",
    "pred",
    "send_to_user",
    "tokenize",
]
