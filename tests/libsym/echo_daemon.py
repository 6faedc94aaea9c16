"""A small real daemon over ServerChannel: `python -m tests.libsym.echo_daemon FD VOCAB_SIZE` serves the listening FD.

It knows no model. PING gives back what it got; its flags make it hold replies or send big ones. PRED gives rows in
which the token before is the likeliest, text is bytes, and files are lists of tokens.
"""

import errno
import json
import os
import selectors
import socket
import struct
import sys
from array import array

from libsym.abi import ATTENTION, LOCK_NOWAIT, RANGE_END, REDUCED, ROWS_ALL, ROWS_LAST, Du, Op
from libsym.channel.handshake import GREETING_BYTES, check_greeting, refusal, welcome
from libsym.channel.server import Request, ServerChannel
from libsym.errors import BadHandle, ProtocolError, SymError, WouldBlock

HOLD = 0x100
"""Flag: do not answer before a ping with RELEASE."""
RELEASE = 0x200
BIG = 0x400
"""Answer with as many bytes as args[0] says."""
FAIL = 0x800
"""Answer with the error whose errno is args[0]."""
MANY = 0x1000
"""Answer as many times as args[0] says: with 0, 1, 2, ...; with HOLD all but the last at once."""
BEST_LOGIT = 5.0
WINDOW = 10
SHRINKS = 299
THE_END = 9999
REQUEST = struct.Struct("=IHHIIQQ4q")
REPLY = struct.Struct("=IiQ4qIIQ")


class Held(Exception):  # not an error: the answer comes when somebody pings with RELEASE
    pass


class Lip:
    def __init__(self, connection: socket.socket, vocab_size: int) -> None:
        self.connection = connection
        self.channel = ServerChannel.create(vocab_size)
        self.files: dict[int, list[int]] = {}
        self.next_handle = 1
        self.closed: list[int] = []
        self.held: list[tuple[Request, tuple[int, ...], bytes]] = []
        self.cuts = 0
        self.cancelled: list[int] = []
        self.locked = False

    def open(self, tokens: list[int]) -> int:
        handle, self.next_handle = self.next_handle, self.next_handle + 1
        self.files[handle] = tokens
        return handle


def disk_usage(request: Request) -> tuple[tuple[int, ...], bytes]:
    """Three files in windows of one, their sum, and their model. One directory is denied."""
    path, _, after = request.payload.decode("utf-8", "surrogateescape").partition("\0")
    if request.args[0] == Du.MODELS:
        return (), json.dumps({"rows": [{"path": "tiny bf16", "pages": 3}]}).encode()
    if request.args[0]:
        return (), json.dumps({"path": path, "pages": 3}).encode()
    names = [name for name in (f"{path}/a", f"{path}/b\udcff", f"{path}/c") if name > after]
    denied = [] if len(names) > 1 else [f"{path}/z"]
    window = {"rows": [{"path": names[0], "pages": 1}], "denied": denied, "last": names[0]}
    return (int(len(names) > 1),), json.dumps(window).encode()


class EchoDaemon:
    def __init__(self, listening: socket.socket, vocab_size: int) -> None:
        self.listening = listening
        self.vocab_size = vocab_size
        self.selector = selectors.DefaultSelector()
        self.lips: list[Lip] = []

    def serve(self) -> None:
        self.selector.register(self.listening, selectors.EVENT_READ, self.accept)
        while True:
            for key, _ in self.selector.select():
                key.data()

    def accept(self) -> None:
        connection, _ = self.listening.accept()
        greeting = connection.recv(GREETING_BYTES, socket.MSG_WAITALL)
        try:
            check_greeting(greeting)
        except SymError as error:
            connection.sendall(refusal(error))
            connection.close()
            return
        lip = Lip(connection, self.vocab_size)
        socket.send_fds(connection, [welcome()], lip.channel.fds)
        lip.channel.forget_fds()
        self.lips.append(lip)
        self.selector.register(connection, selectors.EVENT_READ, lambda: self.hang_up(lip))
        self.selector.register(lip.channel.doorbell, selectors.EVENT_READ, lambda: self.rung(lip))
        self.take(lip)

    def hang_up(self, lip: Lip) -> None:
        if lip in self.lips:
            self.lips.remove(lip)
            self.selector.unregister(lip.connection)
            self.selector.unregister(lip.channel.doorbell)
            lip.channel.close()
            lip.connection.close()

    def rung(self, lip: Lip) -> None:
        if lip in self.lips:
            lip.channel.clear_doorbell()
            self.take(lip)

    def take(self, lip: Lip) -> None:
        try:
            while not lip.channel.arm():
                for request in lip.channel.receive():
                    self.answer(lip, request)
        except ProtocolError:
            self.hang_up(lip)

    def answer(self, lip: Lip, request: Request) -> None:
        try:
            args, payload = self.operate(lip, request)
        except SymError as error:
            lip.channel.reply(request.id, error=error)
            return
        except Held:
            lip.held.append((request, (), b""))
            return
        if request.flags & MANY:
            for number in range(request.args[0] - 1):
                lip.channel.reply(request.id, (number,), payload, more=True)
            args = (request.args[0] - 1,)
        if request.flags & HOLD:
            lip.held.append((request, args, payload))
        else:
            lip.channel.reply(request.id, args, payload)

    def operate(self, lip: Lip, request: Request) -> tuple[tuple[int, ...], bytes]:
        match request.op:
            case Op.PING:
                return self.ping(lip, request)
            case Op.PRED:
                return self.pred(lip, request), b""
            case Op.KV_CREATE | Op.KV_OPEN:
                return (lip.open([]),), b""
            case Op.KV_FORK:
                tokens = self.file(lip, request)
                return (min(lip.open([*tokens]) for _ in range(max(request.args[1], 1))),), b""
            case Op.KV_CLOSE:
                self.file(lip, request)
                del lip.files[request.handle]
                lip.closed.append(request.handle)
                return (), b""
            case Op.KV_TRUNCATE:
                del self.file(lip, request)[request.args[0] :]
                lip.cuts += 1
                return (), b""
            case Op.KV_READ:
                return self.read(lip, request)
            case Op.KV_EXTRACT:
                end = 16 * request.args[1]
                ends = [THE_END if each == RANGE_END else each for each in array("q", request.payload[:end])]
                told = [request.args[0], request.flags, *ends, *request.payload[end:]]
                return (lip.open(told), len(told)), b""
            case Op.KV_MERGE:
                end = 8 * request.args[1]
                told = [request.args[0], request.flags, *array("Q", request.payload[:end]), *request.payload[end:]]
                return (lip.open(told), len(told)), b""
            case Op.KV_LOCK:
                if lip.locked and request.flags & LOCK_NOWAIT:
                    raise WouldBlock("the file is locked by somebody else")
                if lip.locked:
                    raise Held
                lip.locked = True
                return (), b""
            case Op.KV_UNLOCK:
                lip.locked = False
                lip.held = [each for each in lip.held if each[0].op is not Op.KV_LOCK]
                return (), b""
            case Op.CANCEL:  # of what it cannot cancel the answer comes late
                lip.cancelled.append(request.args[0])
                for each in [each for each in lip.held if (each[0].op, each[0].id) == (Op.PING, request.args[0])]:
                    lip.held.remove(each)
                    lip.channel.reply(each[0].id, error=SymError("cancelled", errno.ECANCELED))
                return (), b""
            case Op.PRED_BATCH:
                return (request.args[0],), self.pred_batch(lip, request)
            case Op.CHECK:
                return (), b'{"num_pages": 3, "num_free_pages": 3}'
            case Op.KV_STAT:
                tokens = self.file(lip, request) if request.handle else []
                return (), json.dumps({"kind": "kv", "tokens": len(tokens), "not_known_here": 1}).encode()
            case Op.KV_LIST:
                _, _, after = request.payload.partition(b"\0")
                names = [name for name in ("a.kv", "b\udcff", "c.kv") if os.fsencode(name) > after]
                entries = [{"name": name, "kind": "kv", "size": 4096, "tokens": 3, "new": 1} for name in names[:2]]
                return (int(len(names) > 2),), json.dumps(entries).encode()
            case Op.KV_DU:
                return disk_usage(request)
            case Op.KV_RENAME | Op.CHAT_TEMPLATE:
                return (), json.dumps({"echo": request.payload.decode()}).encode()
            case Op.TOKENIZE:
                return (), array("i", list(request.payload)).tobytes()
            case Op.DETOKENIZE:
                return (), bytes(array("i", request.payload).tolist()).decode("utf-8", "replace").encode()
            case Op.MODEL_INFO:
                info = {"name": "echo", "vocab_size": self.vocab_size, "eos_ids": [0, 2], "bos_id": 1, "colour": "red"}
                return (), json.dumps(info).encode()
            case Op.STAT:
                return (), json.dumps(self.statistics(lip)).encode()
            case _:
                return (), b""

    def read(self, lip: Lip, request: Request) -> tuple[tuple[int, ...], bytes]:
        """Windows of ten entries; a file that ends in SHRINKS loses it after the first."""
        tokens = self.file(lip, request)
        first, wanted = request.args[:2]
        stop = min(first + min(wanted or WINDOW, WINDOW), len(tokens))
        first = min(first, stop)
        reply = array("i", [*tokens[first:stop], *range(first, stop)]).tobytes()
        told = stop - first, len(tokens), lip.cuts
        if tokens and tokens[-1] == SHRINKS:
            del tokens[-1]
            lip.cuts += 1
        return told, reply

    def ping(self, lip: Lip, request: Request) -> tuple[tuple[int, ...], bytes]:
        if request.flags & RELEASE:
            for each in self.lips:
                for held, args, payload in each.held:
                    each.channel.reply(held.id, args, payload)
                each.held.clear()
        if request.flags & FAIL:
            raise SymError(request.payload.decode(), request.args[0])
        if request.flags & BIG:
            return request.args, bytes([request.args[1]]) * request.args[0]
        return request.args, request.payload

    def pred(self, lip: Lip, request: Request) -> tuple[int, ...]:
        tokens = array("i", request.payload[: 4 * request.args[0]]).tolist()
        if request.flags & ATTENTION:  # as a daemon that does not know it
            rest = request.payload[4 * request.args[0] :]
            unknown = f"a reduction of {len(rest)} bytes is malformed"
            unannounced = f"the message goes on for {len(rest)} bytes that nothing announced"
            raise SymError(unknown if request.flags & REDUCED else unannounced, errno.EINVAL)
        file = self.file(lip, request)
        num_rows = len(tokens) if request.flags & ROWS_ALL else 1 if request.flags & ROWS_LAST else 0
        first = lip.channel.take_rows(num_rows) if num_rows else 0
        for index, token in enumerate(tokens[len(tokens) - num_rows :]):
            row = lip.channel.row(first + index)
            row[:] = memoryview(array("f", bytes(4 * self.vocab_size)))
            row[token] = BEST_LOGIT
        file.extend(tokens)
        return first, num_rows, len(file)

    def pred_batch(self, lip: Lip, request: Request) -> bytes:
        """Reply frames as the ABI has them; what fails is in its own frame."""
        frames, at = b"", 0
        for _ in range(request.args[0]):
            size, _, _, flags, _, _, handle, *args = REQUEST.unpack_from(request.payload, at)
            part = Request(Op.PRED, flags, 0, handle, tuple(args), request.payload[at + 64 : at + size])
            try:
                code, told, text = 0, (*self.pred(lip, part), 0), b""
            except SymError as error:
                code, told, text = error.errno or errno.EIO, (0, 0, 0, 0), str(error).encode()
            frames += REPLY.pack(64 + len(text), code, 0, *told, 0, 0, 0) + text + bytes(-len(text) % 64)
            at += (size + 63) // 64 * 64
        return frames

    def file(self, lip: Lip, request: Request) -> list[int]:
        if request.handle not in lip.files:
            raise BadHandle(f"handle {request.handle} is not open in this program")
        return lip.files[request.handle]

    def statistics(self, lip: Lip) -> dict[str, object]:
        return {
            "connections": len(self.lips),
            "held_calls": sum(len(each.held) for each in self.lips),
            "held_slots": lip.channel.num_held_slots,
            "waiting_replies": max(each.channel.num_waiting_replies for each in self.lips),
            "closed": lip.closed,
            "num_cancelled": len(lip.cancelled),
            "open": sorted(lip.files),
            "locked": lip.locked,
        }


if __name__ == "__main__":
    EchoDaemon(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])).serve()
