"""The gate: takes system calls from the rings, answers them, and turns `pred()` into work for the batch scheduler.

What arrives was copied out of shared memory before anyone looked at it; here every field is checked once, and
what passes is a plain value from then on. Each operation is one short function that never awaits, so it is
atomic with respect to every other LIP and to the mount. What takes longer (long texts, long directories, files made of
others) or has to wait (locks) leaves the rest to a coroutine in the program's own nursery.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict
from typing import Any, Protocol
from weakref import WeakValueDictionary

import numpy as np
import trio

from kvfs.fs import FileSystem, OpenKv
from libsym.abi import OPEN_WRITE, TOKENIZE_SPECIAL, Op
from libsym.channel.server import PAYLOAD_BYTES, Request
from libsym.errors import Invalid, NotPermitted, NotSupported, SymError, WouldBlock
from scheduler.batch.batch_scheduler import BatchScheduler
from scheduler.connection.lip import MAX_LATER, MAX_WAITS, Lip
from scheduler.connection.under_way import UnderWay, UserBytes, cost_of
from scheduler.operations.advice import Advising
from scheduler.operations.assemble import Assembler
from scheduler.operations.claims import Claiming
from scheduler.operations.directories import Listing
from scheduler.operations.du import DiskUsage
from scheduler.operations.generate import Generating, Vocabulary
from scheduler.operations.locks import Locking
from scheduler.operations.messages import Mail
from scheduler.operations.pred import Limited, Predicting
from scheduler.operations.usage import Accounting
from scheduler.payloads import check_range, json_of, mode_of, text_of
from scheduler.replies import Reply, json_reply

log = logging.getLogger(__name__)

READ_ENTRIES = PAYLOAD_BYTES // 8
"""Tokens and positions, 4 bytes each, that one reply of KV_READ holds."""
FILES_A_TURN = 32
"""Closed before others get their turn, when a program has gone: 1 ms."""
SHORT_TEXT_BYTES = 2048
"""Texts up to here are tokenized at once (about 0.2 ms); longer ones in a worker thread."""


MAX_CHAT_TEXTS = 20_000
MAX_CHAT_OTHER_BYTES = 64 << 10
"""Some thousands of messages: 20 ms in which nothing else runs, at worst."""


NO_PAYLOAD = frozenset(
    {Op.PING, Op.CANCEL, Op.KV_CLOSE, Op.KV_TRUNCATE, Op.KV_SYNC, Op.KV_READ, Op.KV_LOCK, Op.KV_UNLOCK}
    | {Op.KV_NAME, Op.VOCABULARY, Op.CHECK, Op.GETRUSAGE, Op.MODEL_INFO, Op.STAT}
)
"""These have no use for one; some of them wait, and would keep it."""


class TextModel(Protocol):
    """What the gate asks of the model: its text side and its limits."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_positions(self) -> int: ...

    @property
    def token_texts(self) -> Sequence[bytes]: ...

    @property
    def eos_ids(self) -> frozenset[int]: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    def own_encoder(self) -> Callable[[str], list[int]]:
        """An `encode` without special tokens."""
        ...

    def encode(self, text: str, *, special: bool) -> list[int]: ...

    def decode(self, tokens: list[int]) -> str: ...

    def chat_template(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, *, add_generation_prompt: bool
    ) -> str: ...

    def chat_tokens(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        *,
        add_generation_prompt: bool,
        after_answer: bool,
        checkpoint: Callable[[], None],
    ) -> list[int]:
        """`checkpoint` is called now and then: what it raises ends the call."""
        ...

    def info(self) -> dict[str, Any]:
        """What `model_info()` says."""
        ...


class Gate:
    """Answers the system calls of every LIP."""

    def __init__(
        self, fs: FileSystem, batches: BatchScheduler, text: TextModel, daemon_info: Callable[[], dict[str, Any]]
    ) -> None:
        self._fs = fs
        self._batches = batches
        self._text = text
        self._daemon_info = daemon_info
        self.num_calls: Counter[Op] = Counter()
        """System calls taken, by operation."""
        self._users: WeakValueDictionary[int, UserBytes] = WeakValueDictionary()
        """What the connections of each user have under way, by uid."""
        self._locking = Locking(fs)
        self._claiming = Claiming(fs)
        assembler = Assembler(fs)
        limited = Limited(text)
        predicting = Predicting(batches, limited)
        self._advising = Advising(fs)
        self._mail = Mail(fs.volume.alarms)
        self._now: dict[Op, Callable[[Lip, Request], Reply]] = {
            Op.PING: lambda _lip, _request: Reply(),
            Op.CANCEL: _cancel,
            Op.KV_CREATE: self._kv_create,
            Op.KV_OPEN: self._kv_open,
            Op.KV_FORK: self._kv_fork,
            Op.KV_STAT: self._kv_stat,
            Op.KV_RENAME: self._kv_rename,
            Op.KV_MKDIR: self._kv_mkdir,
            Op.KV_CHMOD: self._kv_chmod,
            Op.KV_READ: self._kv_read,
            Op.KV_REMOVE: self._kv_remove,
            Op.KV_UNLOCK: self._locking.unlock,
            Op.KV_ADVISE: self._advising.advise,
            Op.SUBSCRIBE: self._mail.subscribe,
            Op.UNSUBSCRIBE: self._mail.unsubscribe,
            Op.CHECK: self._check,
            Op.MODEL_INFO: lambda _lip, _request: json_reply(self._text.info()),
            Op.STAT: lambda lip, _request: json_reply(self._daemon_info() | self._account_of(lip)),
            Op.CONFINE: self._confine,
        }
        self._in_turn: dict[Op, Callable[[Lip, Request], None]] = {
            Op.PRED: predicting.pred,
            Op.PRED_BATCH: predicting.pred_batch,
            Op.KV_CLOSE: self._kv_close,
            Op.KV_TRUNCATE: self._kv_truncate,
            Op.KV_NAME: self._kv_name,
            Op.KV_SYNC: self._kv_sync,
            Op.RECV: self._mail.recv,
        }
        self._later: dict[Op, Callable[[Lip, Request], Reply | Coroutine[Any, Any, Reply | None] | None]] = {
            Op.KV_LIST: Listing(fs).list,
            Op.KV_DU: DiskUsage(fs).du,
            Op.KV_EXTRACT: assembler.extract,
            Op.KV_MERGE: assembler.merge,
            Op.KV_LOCK: self._locking.lock,
            Op.KV_CLAIM: self._claiming.claim,
            Op.GENERATE: Generating(batches, text, limited).generate,
            Op.VOCABULARY: Vocabulary(text).window,
            Op.SEND: self._mail.send,
            Op.GETRUSAGE: Accounting(batches).getrusage,
            Op.TOKENIZE: self._long_text,
            Op.DETOKENIZE: self._long_text,
            Op.CHAT_TEMPLATE: self._long_text,
            Op.CHAT_TOKENS: self._long_text,
        }
        self._text_workers = trio.CapacityLimiter(2)  # that long texts may keep busy: others need the cores, too
        self._texts: dict[Op, Callable[[Request], Reply]] = {
            Op.TOKENIZE: self._tokenize,
            Op.DETOKENIZE: self._detokenize,
            Op.CHAT_TEMPLATE: self._chat_template,
            Op.CHAT_TOKENS: self._chat_tokens,
        }

    def handle(self, lip: Lip, request: Request, nursery: trio.Nursery) -> None:
        """Take one system call: answer it now, or see to it that it will be answered."""
        self._batches.sync()
        op = request.op
        self.num_calls[op] += 1
        try:
            self._take_in(lip, request)
        except SymError as error:
            lip.channel.reply(request.id, error=error)
            return
        if op in self._in_turn:
            is_over = self._do(lip, request, self._in_turn[op])
        elif op in self._now:
            is_over = self._do(lip, request, self._now[op])
        elif op in self._texts and op is not Op.CHAT_TOKENS and len(request.payload) <= SHORT_TEXT_BYTES:
            is_over = self._do(lip, request, lambda _lip, request: self._texts[op](request))
        else:
            is_over = self._do(lip, request, lambda lip, request: self._begin(lip, request, nursery))
        if is_over:
            lip.under_way.end(cost_of(request))

    def welcome(self, lip: Lip) -> None:
        """A program has connected: messages may be sent to it from now on."""
        lip.under_way = UnderWay(self._users.setdefault(lip.credentials.uid, UserBytes()))
        self._mail.join(lip)

    def hang_up(self, lip: Lip) -> None:
        """The program has gone: its calls are forgotten and its files closed, once no step uses them."""
        self._disconnect(lip)
        self._close_files(lip, len(lip.handles))

    async def see_off(self, lip: Lip) -> None:
        """`hang_up` of a program with any number of files, without holding anybody up."""
        self._disconnect(lip)
        with trio.CancelScope(shield=True):
            while len(lip.handles) > FILES_A_TURN:
                self._close_files(lip, FILES_A_TURN)
                await trio.lowlevel.checkpoint()
        self._close_files(lip, len(lip.handles))

    def _disconnect(self, lip: Lip) -> None:
        lip.is_connected = False
        self._mail.leave(lip)
        lip.slots.drop()
        lip.under_way.close()
        self._batches.drop(lip)
        lip.cancellable.clear()  # each refers to a call, and so to the program
        lip.claims.clear()
        lip.channel.close()

    def _close_files(self, lip: Lip, count: int) -> None:
        for _ in range(count):
            file = lip.take()
            self._batches.when_unused(file, lambda file=file: self._fs.kv_close(file))  # type: ignore[misc]

    @staticmethod
    def _take_in(lip: Lip, request: Request) -> None:
        """Count a request in, unless it is too much, or has what nobody will look at."""
        num_bytes = len(request.payload)
        if num_bytes and request.op in NO_PAYLOAD:
            raise Invalid(f"{request.op.name} takes no payload, and {num_bytes} bytes came with it")
        lip.under_way.begin(cost_of(request))

    def _answer(self, lip: Lip, request: Request, operation: Callable[[Lip, Request], Reply | None]) -> None:
        self._do(lip, request, operation)

    def _do(self, lip: Lip, request: Request, operation: Callable[[Lip, Request], Reply | None]) -> bool:
        """Answer with what an operation gives. False: it goes on, and what answers it ends it in `lip.under_way`."""
        try:
            reply = operation(lip, request)
        except SymError as error:
            lip.channel.reply(request.id, error=error)
        except Exception as failure:
            log.exception("%s of program %d failed", request.op.name, lip.pid)
            lip.channel.reply(request.id, error=SymError(f"{request.op.name} failed inside the daemon: {failure!r}"))
        else:
            if reply is None:
                return False
            lip.channel.reply(request.id, reply.args, reply.payload)
        return True

    def _begin(self, lip: Lip, request: Request, nursery: trio.Nursery) -> Reply | None:
        """Begin an operation; what it leaves to a coroutine is answered when that ends."""
        most = MAX_WAITS if request.op in {Op.KV_LOCK, Op.KV_CLAIM} else MAX_LATER
        if lip.num_later >= most:
            raise WouldBlock(f"{most} calls of this program wait already: let some of them end")
        if request.op not in self._later:
            raise NotSupported(f"this daemon does not do {request.op.name}")
        outcome = self._later[request.op](lip, request)
        if outcome is None or isinstance(outcome, Reply):
            return outcome  # None: it answers by itself
        lip.num_later += 1
        scope = trio.CancelScope()
        # Now: the cancellation may be in the same batch. (Of two calls with one id, the LIP's own fault, one can be.)
        lip.cancellable[request.id] = scope.cancel
        nursery.start_soon(self._answer_later, lip, request, outcome, scope)
        return None

    async def _answer_later(
        self, lip: Lip, request: Request, rest: Coroutine[Any, Any, Reply | None], scope: trio.CancelScope
    ) -> None:
        outcome: Reply | Exception | None = SymError(f"{request.op.name.lower()}() was cancelled", errno.ECANCELED)
        try:
            with scope:
                outcome = await rest
        except Exception as failure:  # noqa: BLE001 - reported by _answer, which knows every kind
            outcome = failure
        finally:
            lip.num_later -= 1
            lip.cancellable.pop(request.id, None)
            lip.under_way.end(cost_of(request))

        def result(_lip: Lip, _request: Request) -> Reply | None:
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        if lip.is_connected:
            self._answer(lip, request, result)
            if request.op is Op.KV_CLAIM and isinstance(outcome, Reply):
                self._remember_claim(lip, request, outcome.args[0], is_cancelled=scope.cancel_called)
        outcome = None  # an error leads to the frame that it is kept in: the two would be garbage

    # ---- who asks

    def _confine(self, lip: Lip, request: Request) -> Reply:
        if lip.credentials.root is not None:
            raise NotPermitted("this connection is confined to a domain already: connect again for another")
        if lip.handles or lip.num_later:
            raise Invalid("only a connection without open files can be confined to a domain: connect again")
        lip.credentials = self._fs.confine(lip.credentials, text_of(request))
        self._mail.leave(lip)
        self._mail.join(lip)
        return Reply()

    def _account_of(self, lip: Lip) -> dict[str, Any]:
        """What the caller has of pages and files, and may have."""
        account = self._fs.account_of(lip.credentials)
        return {
            "used_bytes": account.num_bytes,
            "used_files": account.num_files,
            "quota_bytes": account.limits.num_bytes,
            "quota_files": account.limits.num_files,
        }

    # ---- files

    def _kv_create(self, lip: Lip, request: Request) -> Reply:
        file = self._fs.kv_create(lip.credentials, text_of(request) or None, mode_of(request))
        return lip.opened(file)

    def _kv_open(self, lip: Lip, request: Request) -> Reply:
        file = self._fs.kv_open(lip.credentials, text_of(request), write=bool(request.flags & OPEN_WRITE))
        return lip.opened(file)

    def _kv_fork(self, lip: Lip, request: Request) -> Reply:
        source = lip.file(request.handle)
        file = self._fs.kv_fork(lip.credentials, source, text_of(request) or None, mode_of(request))
        return lip.opened(file)

    def _kv_stat(self, lip: Lip, request: Request) -> Reply:
        if request.handle:
            return json_reply(asdict(self._fs.kv_stat_open(lip.file(request.handle))))
        return json_reply(asdict(self._fs.kv_stat(lip.credentials, text_of(request))))

    def _kv_rename(self, lip: Lip, request: Request) -> Reply:
        names = json_of(request, request.payload, max_texts=2, max_other_bytes=64)
        if not (isinstance(names, list) and len(names) == 2 and all(isinstance(name, str) for name in names)):
            raise Invalid("rename takes two paths")
        return Reply(self._fs.kv_rename(lip.credentials, names[0], names[1]))

    def _kv_mkdir(self, lip: Lip, request: Request) -> Reply:
        self._fs.kv_mkdir(lip.credentials, text_of(request), mode_of(request))
        return Reply()

    def _kv_chmod(self, lip: Lip, request: Request) -> Reply:
        self._fs.kv_chmod(lip.credentials, text_of(request), mode_of(request))
        return Reply()

    def _kv_read(self, lip: Lip, request: Request) -> Reply:
        """A window: what there is from entry `first` on, as far as a message reaches and was asked for."""
        content = lip.file(request.handle).content
        first, wanted = request.args[:2]
        if first < 0 or wanted < 0:
            raise Invalid(f"kv_read() takes entries from 0 on, not {first} and {wanted} of them")
        length = content.table.length
        first = min(first, length)
        stop = min(first + min(wanted or READ_ENTRIES, READ_ENTRIES), length)
        tokens, positions = content.table.read(first, stop)
        return Reply((stop - first, length, content.cuts), tokens.tobytes() + positions.tobytes())

    def _kv_remove(self, lip: Lip, request: Request) -> Reply:
        if request.handle:
            self._fs.kv_remove_open(lip.credentials, lip.file(request.handle), text_of(request))
            lip.end_generations(request.handle)
        else:
            self._fs.kv_remove(lip.credentials, text_of(request))
        return Reply()

    def _check(self, lip: Lip, _request: Request) -> Reply:
        """The whole of the books at once: some microseconds for each file, so it is for those who run the daemon."""
        if lip.credentials.uid not in {0, os.geteuid()}:
            raise NotPermitted(f"only root and the daemon's user may check its books, not uid {lip.credentials.uid}")
        try:
            return json_reply(asdict(self._fs.audit()))
        except SymError as error:
            log.error("%s", error)  # noqa: TRY400 - the error says it all
            raise

    # ---- what waits for earlier calls on the same file

    def _kv_close(self, lip: Lip, request: Request) -> None:
        file = self._take(lip, request.handle)

        def close(_lip: Lip, _request: Request) -> Reply:
            self._fs.kv_close(file)
            return Reply()

        self._batches.when_unused(file, lambda: self._answer(lip, request, close))

    def _take(self, lip: Lip, handle: int) -> OpenKv:
        """A handle ends: whoever calls this closes the file, once no step uses it."""
        file = lip.remove(handle)
        lip.end_generations(handle)
        self._locking.end_waits(file)
        return file

    def _remember_claim(self, lip: Lip, request: Request, handle: int, *, is_cancelled: bool) -> None:
        """A claim whose answer nobody looks at keeps others waiting: CANCEL ends it, before its answer or behind it."""

        def take_back() -> None:
            if lip.file(handle).claim is not None:
                file = self._take(lip, handle)
                self._batches.when_unused(file, lambda: self._fs.kv_close(file))

        if is_cancelled:  # as the claim was given: too late to keep it from that
            take_back()
        else:
            lip.claims[handle] = request.id
            lip.cancellable[request.id] = take_back

    def _kv_truncate(self, lip: Lip, request: Request) -> None:
        file = lip.file(request.handle)
        length = request.args[0]
        if length < 0:
            raise Invalid(f"kv_truncate() cuts to 0 entries or more, not {length}")
        lip.end_generations(request.handle)

        def truncate(_lip: Lip, _request: Request) -> Reply:
            self._fs.kv_truncate(file, length)
            return Reply((length,))

        self._batches.exclusive(file, lambda: self._answer(lip, request, truncate))

    def _kv_name(self, lip: Lip, request: Request) -> None:
        file = lip.file(request.handle)
        lip.end_generations(request.handle)
        self._batches.exclusive(file, lambda: self._answer(lip, request, self._claiming.name))

    def _kv_sync(self, lip: Lip, request: Request) -> None:
        file = lip.file(request.handle)
        self._batches.exclusive(file, lambda: self._answer(lip, request, self._advising.refuse_sync))

    # ---- text

    def _long_text(self, _lip: Lip, request: Request) -> Coroutine[Any, Any, Reply]:
        return trio.to_thread.run_sync(self._texts[request.op], request, limiter=self._text_workers)

    def _tokenize(self, request: Request) -> Reply:
        tokens = self._text.encode(text_of(request), special=bool(request.flags & TOKENIZE_SPECIAL))
        return Reply((len(tokens),), np.asarray(tokens, np.int32).tobytes())

    def _detokenize(self, request: Request) -> Reply:
        if len(request.payload) % 4:
            raise Invalid("detokenize() takes 32-bit token ids")
        tokens = np.frombuffer(request.payload, np.int32)
        check_range("token", tokens, self._text.vocab_size, "the vocabulary")
        return Reply((), self._text.decode(tokens.tolist()).encode())

    def _chat_template(self, request: Request) -> Reply:
        form = _chat_form(request)
        text = self._text.chat_template(
            form["messages"], form.get("tools"), add_generation_prompt=bool(form.get("add_generation_prompt", True))
        )
        try:
            return Reply((), text.encode())
        except UnicodeEncodeError:
            raise Invalid("chat_template(): the messages have half a surrogate pair in them, no Unicode text") from None

    def _chat_tokens(self, request: Request) -> Reply:
        """In a worker, always: the template runs several times when it has to be told apart from the messages."""
        form = _chat_form(request)
        tokens = self._text.chat_tokens(
            form["messages"],
            form.get("tools"),
            add_generation_prompt=bool(form.get("add_generation_prompt", True)),
            after_answer=bool(form.get("after_answer", False)),
            checkpoint=trio.from_thread.check_cancelled,  # of a call that is cancelled, or whose program has gone
        )
        return Reply((len(tokens),), np.asarray(tokens, np.int32).tobytes())


def _chat_form(request: Request) -> dict[str, Any]:
    form = json_of(request, request.payload, max_texts=MAX_CHAT_TEXTS, max_other_bytes=MAX_CHAT_OTHER_BYTES)
    if not isinstance(form, dict) or not isinstance(form.get("messages"), list):
        raise Invalid(f"{request.op.name.lower()}() takes a list of messages")
    return form


def _cancel(lip: Lip, request: Request) -> Reply:
    """Ends the call whose id is args[0], if it is one that can be ended and is still under way."""
    cancel = lip.cancellable.pop(request.args[0], None)
    if cancel is not None:
        cancel()
    return Reply()
