"""libsym: the system calls of Symphony, for programs that call a language model.

A program of Symphony is an ordinary Python process. It calls the model as it would call the kernel: `pred` appends
tokens to a KV file and gives the distribution of the next one. The loop around it is the program's own.

    >>> import libsym as sym
    >>> kv = sym.kv_create()
    >>> tokens = sym.tokenize("Once upon")
    >>> for _ in range(3):
    ...     tokens = [sym.pred(kv, tokens).argmax()]
    ...     sym.send_to_user(sym.detokenize(tokens))
    nnn

(Examples are run with `symphony serve --model tiny`, whose tokens are bytes. help(sym.pred) describes one call, the
manual page libsym(3) all of them with their errors, kv(5) the files.)

THE MODEL
    pred            append tokens, run the model, give the distribution of the next: a Dist, or what was asked of it
    pred_batch      many of them, each a Pred, in one crossing: beams, trees
    generate        a plain loop over pred that the daemon runs: a Generation, an iterator of tokens or of text;
                    with a Grammar only what it allows, with drafts (Ngram) in fewer steps
    generate_n      several that go on from one text, which is computed once
    decode          the loop over pred with a function of the program's own that draws: a Decoding
    score           how likely a text is: the log-probability of each of its tokens; perplexity is of these
    model_info      which model it is: a ModelInfo

DISTRIBUTIONS
    Dist            a row of logits, or several, without a copy: argmax, topk, logprob, entropy, probs, sample, logits
    ReducedDist     only what pred was asked for: the k likeliest, named log-probabilities, a drawn token
    Attention       how much each entry, or page, was attended to: pred(..., attention="entries").attention
    Sampler         how tokens are drawn: temperature, top_k, top_p, min_p, typical_p, penalties, bias, seed
    Dry, Mirostat   parts of a Sampler: less repetition; a text of a steady surprise
    Draws           the draws along one loop, as Sampler.start gives them

KV FILES, which are KV objects when they are open; paths are relative to the root of the mount
    kv_create, kv_open, kv_close, kv_remove        as files are
    kv_open_or_compute                             one computes, the others wait; whole, or not there
    kv_write, kv_read, kv_truncate                 entries: append, read, cut
    kv_rewind                                      cuts to what a text has in common, and says what is missing
    kv_fork                                        a copy in constant time
    kv_extract, kv_merge                           new files of entries of others
    kv_keep                                        some entries, in place: what a cache evicts
    kv_list, kv_stat, kv_du, kv_rename, kv_chmod   names: KvEntry, KvStat
    kv_hot                                         those that are used most, each a HotFile
    kv_mkdir                                       directories
    kv_lock, kv_unlock                             as flock(2)
    kv_advise                                      Advised: PIN, UNPIN, TTL, PRIORITY, COLD, WILLNEED; Pinning is PIN's
    Tree                                           a tree of forks, as a search makes one
    kv_pressure                                    room runs short: a Pressure, which names each Candidate to go
    kv_sync                                        as fsync(2): the file survives a power cut

    TokenSet        a set of tokens, as allowed= takes it; token_set makes one by numbers or by text

TEXT
    Chat                                           a conversation in a KV file: ask, undo, fork
    chat_tokens                                    of a conversation, or its next turn; messages are text to it
    tokenize, detokenize, chat_template            by the model's own tokenizer
    Detokenizer                                    text that comes token by token
    vocabulary                                     the bytes of each token

PROGRAMS
    Arguments                                      what a program is given: its docstring is the help
    command, main                                  runs a program's main function, and ends as a command ends
    spawn, wait, kill                              start another, a Child; hear how it Ended; end it
    Interpreter                                    runs a model's Python code, confined by the kernel
    Budget                                         what a search may still spend
    programs                                       those that there are, each a ProgramInfo
    getpid, getrusage                              who it is, and its Usage

OTHERS
    send, recv, subscribe, unsubscribe             messages: to a pid, or to all that read a topic
    send_to_user, recv_from_user                   with whoever launched the program
    connect, close                                 the connection; the first call makes it; after a restart: wait=30
    connection                                     one more, a Connection: of a domain, say
    daemon_stat, daemon_check                      the daemon's state, and its books
    aio                                            the same names as coroutines, for trio and asyncio

ERRORS. What fails raises a SymError: an OSError with an errno, and a message of one line that names the thing, the
value and what to do. By class: BadHandle, BatchFailed, Busy, CrossDevice, Exists, Invalid, IsDirectory, NameTooLong,
NoAccess, NoBuffers, NoSpace, NotConnected, NotDirectory, NotEmpty, NotFound, NotPermitted, NotSupported, OverQuota,
ProtocolError, StepFailed, TimedOut, TooLarge, TooManyLinks, WouldBlock.

    >>> try:
    ...     sym.kv_open("no.kv")
    ... except sym.NotFound as error:
    ...     print(error)
    no.kv: no such file

THREADS. Functions may be called from any thread; all threads share one connection, and other threads run while one
waits. Ctrl-C ends a wait.

FORKS. A child by fork(2) has a connection of its own with its first call. KV objects of the parent are BadHandle there.

A DAEMON THAT GOES AWAY wakes whoever waits with NotConnected, and so fails every call until the program says connect():
handles and anonymous files went with it. The daemon is found through SYMPHONY_SOCKET or at its default place.

EVENT LOOPS. `await sym.aio.pred(kv, tokens)`: see help(sym.aio).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from libsym.advice import COLD, PIN, PRIORITY, TTL, UNPIN, WILLNEED, Advised, Pinning, kv_advise, kv_sync
from libsym.budget import Budget
from libsym.channel.process import Connection, close, connect, connection
from libsym.chat import Chat
from libsym.children import Child, Ended, ProgramInfo, kill, programs, spawn, wait
from libsym.computed import kv_open_or_compute
from libsym.decode import Decoding, decode
from libsym.errors import (
    BadHandle,
    BatchFailed,
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
    TimedOut,
    TooLarge,
    TooManyLinks,
    WouldBlock,
)
from libsym.generate import Generation, Grammar, Ngram, generate
from libsym.info import HotFile, KvEntry, KvStat, ModelInfo
from libsym.interpreter import Interpreter
from libsym.kv import (
    KV,
    kv_close,
    kv_create,
    kv_extract,
    kv_fork,
    kv_keep,
    kv_lock,
    kv_merge,
    kv_open,
    kv_read,
    kv_remove,
    kv_rewind,
    kv_stat,
    kv_truncate,
    kv_unlock,
)
from libsym.messages import recv, send, subscribe, unsubscribe
from libsym.names import kv_chmod, kv_du, kv_hot, kv_list, kv_mkdir, kv_rename
from libsym.pred import Pred, kv_write, pred, pred_batch
from libsym.pressure import Candidate, Pressure, kv_pressure
from libsym.program import main
from libsym.rows.attention import Attention
from libsym.rows.dist import Dist
from libsym.rows.parts import Dry, Mirostat
from libsym.rows.reduced import ReducedDist
from libsym.rows.sampler import Draws, Sampler
from libsym.rows.token_set import TokenSet
from libsym.scoring import perplexity, score
from libsym.several import generate_n
from libsym.status import daemon_check, daemon_stat, model_info
from libsym.text import Detokenizer, chat_template, chat_tokens, detokenize, tokenize
from libsym.tree import Tree
from libsym.usage import Usage, getpid, getrusage
from libsym.user import recv_from_user, send_to_user
from libsym.vocabulary import token_set, vocabulary

if TYPE_CHECKING:
    from libsym import aio as aio
    from libsym.command_line import Arguments as Arguments
    from libsym.command_line import command as command


def __getattr__(name: str) -> object:
    """`aio`, `Arguments` and `command` are loaded when a program first asks for them: what they import takes time."""
    if name == "aio":
        return importlib.import_module("libsym.aio")
    if name in {"Arguments", "command"}:
        return getattr(importlib.import_module("libsym.command_line"), name)
    raise AttributeError(f"module 'libsym' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the names that programs use: `aio`, too, and no module that only looks like a call (`libsym.text`)."""
    return [*(name for name in globals() if name.startswith("__")), *__all__]


__version__ = "0.2.0"

__all__ = [
    "COLD",
    "KV",
    "PIN",
    "PRIORITY",
    "TTL",
    "UNPIN",
    "WILLNEED",
    "Advised",
    "Arguments",
    "Attention",
    "BadHandle",
    "BatchFailed",
    "Budget",
    "Busy",
    "Candidate",
    "Chat",
    "Child",
    "Connection",
    "CrossDevice",
    "Decoding",
    "Detokenizer",
    "Dist",
    "Draws",
    "Dry",
    "Ended",
    "Exists",
    "Generation",
    "Grammar",
    "HotFile",
    "Interpreter",
    "Invalid",
    "IsDirectory",
    "KvEntry",
    "KvStat",
    "Mirostat",
    "ModelInfo",
    "NameTooLong",
    "Ngram",
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
    "Pinning",
    "Pred",
    "Pressure",
    "ProgramInfo",
    "ProtocolError",
    "ReducedDist",
    "Sampler",
    "StepFailed",
    "SymError",
    "TimedOut",
    "TokenSet",
    "TooLarge",
    "TooManyLinks",
    "Tree",
    "Usage",
    "WouldBlock",
    "aio",
    "chat_template",
    "chat_tokens",
    "close",
    "command",
    "connect",
    "connection",
    "daemon_check",
    "daemon_stat",
    "decode",
    "detokenize",
    "generate",
    "generate_n",
    "getpid",
    "getrusage",
    "kill",
    "kv_advise",
    "kv_chmod",
    "kv_close",
    "kv_create",
    "kv_du",
    "kv_extract",
    "kv_fork",
    "kv_hot",
    "kv_keep",
    "kv_list",
    "kv_lock",
    "kv_merge",
    "kv_mkdir",
    "kv_open",
    "kv_open_or_compute",
    "kv_pressure",
    "kv_read",
    "kv_remove",
    "kv_rename",
    "kv_rewind",
    "kv_stat",
    "kv_sync",
    "kv_truncate",
    "kv_unlock",
    "kv_write",
    "main",
    "model_info",
    "perplexity",
    "pred",
    "pred_batch",
    "programs",
    "recv",
    "recv_from_user",
    "score",
    "send",
    "send_to_user",
    "spawn",
    "subscribe",
    "token_set",
    "tokenize",
    "unsubscribe",
    "vocabulary",
    "wait",
]
