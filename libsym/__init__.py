"""libsym: the system calls of Symphony, for programs that call a language model.

A program of Symphony is an ordinary Python process. The program calls the model as it would call the kernel: `pred`
appends tokens to a KV file and returns the distribution of the next token. The program writes its own loop around it.

    >>> import libsym as sym
    >>> kv = sym.kv_create()
    >>> tokens = sym.tokenize("Once upon")
    >>> for _ in range(3):
    ...     tokens = [sym.pred(kv, tokens).argmax()]
    ...     sym.send_to_user(sym.detokenize(tokens))
    nnn

(Examples are run with `symphony serve --model tiny`, whose tokens are bytes. help(sym.pred) describes one call. The
manual page libsym(3) describes all calls with their errors, kv(5) the files.)

THE MODEL
    pred            append tokens, run the model, return the distribution of the next token: a Dist or a ReducedDist
    pred_batch      many pred calls in one message, each a Pred: for beams and trees
    generate        a plain loop over pred that the daemon runs: a Generation, an iterator of tokens or of text;
                    a Grammar limits the text, drafts (Ngram) save steps
    generate_n      several generations from one prompt, which is computed once
    decode          a loop over pred that draws each token with a function of the program: a Decoding
    score           log-probability of each token of a text; perplexity summarises them
    model_info      facts of the model: a ModelInfo

DISTRIBUTIONS
    Dist            one or more rows of logits, not copied: argmax, topk, logprob, entropy, probs, sample, logits
    ReducedDist     the facts that pred was asked for: the k likeliest, log-probabilities of named tokens, a drawn token
    Attention       attention that each entry, or page, was given: pred(..., attention="entries").attention
    Sampler         how tokens are drawn: temperature, top_k, top_p, min_p, typical_p, penalties, bias, seed
    Dry, Mirostat   parts of a Sampler: Dry penalises repetition, Mirostat keeps the surprise of a text steady
    Draws           the draws of one loop, as Sampler.start returns them

KV FILES. An open file is a KV object. Paths are relative to the root of the mount.
    kv_create, kv_open, kv_close, kv_remove        create, open, close and remove a file
    kv_open_or_compute                             open a file; exactly one caller computes it if it is missing
    kv_write, kv_read, kv_truncate                 append, read and cut entries
    kv_rewind                                      cut a file to the prefix that it shares with a text
    kv_fork, kv_fork_n                             a copy in constant time, or several
    kv_extract, kv_merge                           a new file from entries of other files
    kv_fetch                                       a copy of a file of another daemon
    kv_keep                                        keep some entries in place, as a cache that evicts does
    kv_list, kv_stat, kv_du, kv_rename, kv_chmod   names and their facts: KvEntry, KvStat
    kv_hot                                         the most used files, each a HotFile
    kv_changes                                     what has happened to files: KvChanges, with a KvChange for each
    kv_mkdir                                       make a directory
    kv_lock, kv_unlock                             lock a file, as flock(2) does
    kv_advise                                      Advised: PIN, UNPIN, TTL, PRIORITY, COLD, WILLNEED; PIN is a Pinning
    Tree                                           a tree of forks, for a search
    kv_pressure                                    wait until memory or a quota runs short: a Pressure of Candidates
    kv_sync                                        wait until a file survives a power cut, as fsync(2) does

    Candidate       a file that a Pressure suggests to free
    TokenSet        a set of tokens for allowed=; token_set makes one from ids or from a test of the text

TEXT
    Chat                                           a conversation in a KV file: ask, undo, fork
    chat_tokens                                    tokens of a conversation or its next turn; messages are plain text
    tokenize, detokenize, chat_template            the model's own tokenizer and template
    Detokenizer                                    text from tokens that come one by one
    vocabulary                                     the bytes of each token

PROGRAMS
    Arguments                                      a program's command line; the program's docstring is its help
    command, main                                  run a program's main function, and exit as a command does
    spawn, wait, kill                              start a program (a Child), wait until it Ended, send it a signal
    Interpreter                                    run a model's Python code, confined by the kernel
    Budget                                         the limit of a search: what it may still spend
    programs                                       list the programs, each a ProgramInfo
    getpid, getrusage                              this program's pid, and its Usage

OTHERS
    send, recv, subscribe, unsubscribe             messages: to a pid, or to all readers of a topic
    send_to_user, recv_from_user                   text to and from the user who launched the program
    connect, close                                 make or end the connection; after a restart: connect(wait=30)
    connection                                     a second Connection, for example to a domain
    daemon_stat, daemon_check                      the daemon's state; a check of its page accounting
    fleet_place                                    the machine of the fleet on which a program should run
    fleet_machines                                 the machines of the fleet, and what they hold
    aio                                            the same names as coroutines, for trio and asyncio

ERRORS. A call that fails raises a SymError: an OSError with an errno and a message of one line. The message names the
thing, the value and what to do. The classes are BadHandle, BatchFailed, Busy, CrossDevice, Exists, Invalid,
IsDirectory, NameTooLong, NoAccess, NoBuffers, NoSpace, NotConnected, NotDirectory, NotEmpty, NotFound, NotPermitted,
NotSupported, OverQuota, ProtocolError, StepFailed, TimedOut, TooLarge, TooManyLinks, WouldBlock.

    >>> try:
    ...     sym.kv_open("no.kv")
    ... except sym.NotFound as error:
    ...     print(error)
    no.kv: no such file

THREADS. Any thread may call any function. All threads share one connection. While a thread waits, other threads run.
Ctrl-C ends a wait.

FORKS. A child made by fork(2) gets its own connection with its first call. In the child, KV objects of the parent raise
BadHandle.

THE DAEMON ENDS. Every call that waits, and every later call, fails with NotConnected until the program calls
connect(). Handles and anonymous files are lost. The program finds the daemon through SYMPHONY_SOCKET or at its default
place.

EVENT LOOPS. `await sym.aio.pred(kv, tokens)`: see help(sym.aio).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from libsym.calls.advice import COLD, PIN, PRIORITY, TTL, UNPIN, WILLNEED, Advised, Pinning, kv_advise
from libsym.calls.changes import KvChange, KvChanges, kv_changes
from libsym.calls.children import Child, Ended, ProgramInfo, kill, programs, spawn, wait
from libsym.calls.computed import kv_open_or_compute
from libsym.calls.generate import Generation, Grammar, Ngram, generate
from libsym.calls.info import HotFile, KvEntry, KvStat, ModelInfo
from libsym.calls.kv import (
    KV,
    kv_close,
    kv_create,
    kv_extract,
    kv_fetch,
    kv_fork,
    kv_fork_n,
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
from libsym.calls.messages import recv, send, subscribe, unsubscribe
from libsym.calls.names import kv_chmod, kv_du, kv_hot, kv_list, kv_mkdir, kv_rename
from libsym.calls.pred import Pred, kv_write, pred, pred_batch
from libsym.calls.pressure import Candidate, Pressure, kv_pressure
from libsym.calls.program import main
from libsym.calls.several import generate_n
from libsym.calls.status import daemon_check, daemon_stat, fleet_machines, fleet_place, model_info
from libsym.calls.sync import kv_sync
from libsym.calls.text import Detokenizer, chat_template, chat_tokens, detokenize, tokenize
from libsym.calls.usage import Usage, getpid, getrusage
from libsym.calls.user import recv_from_user, send_to_user
from libsym.calls.vocabulary import token_set, vocabulary
from libsym.channel.process import Connection, close, connect, connection
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
from libsym.rows.attention import Attention
from libsym.rows.dist import Dist
from libsym.rows.parts import Dry, Mirostat
from libsym.rows.reduced import ReducedDist
from libsym.rows.sampler import Draws, Sampler
from libsym.rows.token_set import TokenSet
from libsym.tools.budget import Budget
from libsym.tools.chat import Chat
from libsym.tools.decode import Decoding, decode
from libsym.tools.interpreter import Interpreter
from libsym.tools.scoring import perplexity, score
from libsym.tools.tree import Tree

if TYPE_CHECKING:
    from libsym import aio as aio
    from libsym.tools.command_line import Arguments as Arguments
    from libsym.tools.command_line import command as command


def __getattr__(name: str) -> object:
    """Load `aio`, `Arguments` and `command` when a program first asks for them: their imports take time."""
    if name == "aio":
        return importlib.import_module("libsym.aio")
    if name in {"Arguments", "command"}:
        return getattr(importlib.import_module("libsym.tools.command_line"), name)
    raise AttributeError(f"module 'libsym' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the names that programs use, `aio` included, without the modules that define them."""
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
    "KvChange",
    "KvChanges",
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
    "fleet_machines",
    "fleet_place",
    "generate",
    "generate_n",
    "getpid",
    "getrusage",
    "kill",
    "kv_advise",
    "kv_changes",
    "kv_chmod",
    "kv_close",
    "kv_create",
    "kv_du",
    "kv_extract",
    "kv_fetch",
    "kv_fork",
    "kv_fork_n",
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
