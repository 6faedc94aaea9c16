"""The machines of a fleet, as etcd lists them.

Each daemon keeps a record `symphony/FLEET/machines/NAME` under a lease. Every few seconds the daemon renews the lease
and reads the records of all machines. A daemon that ends, or is cut off from etcd, disappears with its lease.

A record `symphony/FLEET/machines/NAME/drain` says that a machine is drained: programs and copies go to other machines.
"""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, TypeVar

import trio

from libsym.errors import Exists, SymError, TimedOut
from symphony.fleet.etcd import Etcd, Record, putting, removing
from symphony.settings.kinds import MACHINE_NAME, address

log = logging.getLogger(__name__)

T = TypeVar("T")

TTL_S = 10
"""Time after which a daemon that does not renew its lease is gone."""
MAX_MACHINES, MAX_RECORD_BYTES = 256, 1536
"""Limits of what a daemon takes from etcd: an answer to `symphony stat` has a mebibyte, and holds all machines."""
MAX_NUMBER = 1 << 50
"""Upper bound of the numbers in a record."""
RENEW_S, RETRY_S = 3.0, 1.0
"""Time from the beginning of a round to the next one, and from a failure to the next round."""
JOIN_S, REVOKE_S = 6.0, 1.0
"""Time that a daemon gives etcd at its start, more than one request takes, and at its end."""
NUM_WORKERS = 2
DRAIN = "/drain"
HAS_LEFT = "this machine has left the fleet; a restart of the daemon brings it back"


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a machine. Numbers are rounded, since each change is written to the disks of etcd."""

    calls: int
    """Mean number of calls that a step held, rounded up."""
    step_us: int
    """Time of a step at this load."""
    row_us: int
    """Time that one more row of a prompt adds to a step."""
    backlog_us: int
    """Time of the rows that wait to be computed."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A daemon of the fleet, as its record says."""

    address: str
    """HOST:PORT at which the daemon serves peers."""
    state: str
    """Identity of the daemon's state directory. Only one daemon at a time has it."""
    model: str
    identity: dict[str, str]
    bits: str
    free_bytes: int
    """Memory for pages that holds none, roughly."""
    since_s: int
    """Time at which the daemon started, in seconds since 1970."""
    load: Load | None = None
    """None: a daemon of an earlier release, which publishes no load."""

    def differences(self, other: Machine) -> list[str]:
        """Return the facts of the identity that differ, and `bits` if the processors compute other bits."""
        keys = self.identity.keys() | other.identity.keys()
        found = sorted(key for key in keys if self.identity.get(key) != other.identity.get(key))
        return found + ["bits"] * (self.bits != other.bits)


def machine_of(record: Record) -> Machine | None:
    """Return the machine in a record. None: the record is malformed, or of a later version that has other fields."""
    if len(record.value) > MAX_RECORD_BYTES or not record.value.isascii():  # `asdict` with json.dumps is ASCII
        return None
    try:
        match json.loads(record.value):
            case {
                "address": str(where), "state": str(state), "model": str(model), "identity": dict(identity),
                "bits": str(bits), "free_bytes": int(free_bytes), "since_s": int(since_s),
                **others,
            }:  # fmt: skip
                address(where)
                texts, numbers = (where, state, model, bits, *identity, *identity.values()), (free_bytes, since_s)
                if all(isinstance(each, str) and each.isprintable() for each in texts) and all(
                    0 <= each < MAX_NUMBER for each in numbers
                ):
                    return Machine(where, state, model, identity, bits, free_bytes, since_s, _load_of(others))
    except (ValueError, RecursionError):
        pass
    return None


def _load_of(fields: Mapping[Any, Any]) -> Load | None:
    """Return the load in the fields of a record. None: there is none, or it is malformed."""
    match fields:
        case {"load": {"calls": int(calls), "step_us": int(step), "row_us": int(row), "backlog_us": int(backlog)}}:
            if all(0 <= each < MAX_NUMBER for each in (calls, step, row, backlog)):
                return Load(calls, step, row, backlog)
    return None


class Membership:
    """The place of a daemon in its fleet."""

    def __init__(self, etcd: Etcd, fleet: str, name: str, mine: Callable[[], Machine]) -> None:
        """`mine`: function that returns the facts of this daemon. A daemon without an address gets no record."""
        self.addresses: dict[str, tuple[str, int]] = {}
        """Addresses of the other machines, by name."""
        self.drained = frozenset[str]()
        """Machines that get no programs and no copies."""
        self.has_left = False
        """Whether this machine is in the list no more, as its operator wants."""
        self._name = name
        self._machines: dict[str, Machine] = {}
        self._etcd = etcd
        self._fleet = fleet
        self._prefix = f"symphony/{fleet}/machines/"
        self._mine = mine
        self._lease = 0
        self._lease_ends_s = 0.0
        """Time until which the lease is surely there."""
        self._trouble = ""
        self._round, self._workers = trio.Lock(), trio.CapacityLimiter(NUM_WORKERS)

    @property
    def name(self) -> str:
        return self._name

    @property
    def lease(self) -> int:
        """Lease of this machine. 0: etcd does not list it, or the lease may have ended meanwhile."""
        is_sure = self._name in self._machines and trio.current_time() < self._lease_ends_s
        return self._lease if is_sure and not self.has_left else 0

    @property
    def serves(self) -> bool:
        """Whether other machines can fetch files of this one. If not, etcd does not list it."""
        return bool(self._mine().address)

    @property
    def present(self) -> list[str]:
        """The machines that etcd lists."""
        return [*self._machines]

    def staying(self, identity: Mapping[str, str]) -> set[str]:
        """Return the machines that etcd lists, compute with this model, and are not drained."""
        return {name for name, each in self._machines.items() if each.identity == identity and name not in self.drained}

    def machines(self) -> dict[str, Machine]:
        """Return the machines by name, as etcd listed them last. This machine is one of them, and as it is now."""
        return {**self._machines, self._name: self._mine()}

    def others(self) -> list[str]:
        """Return the other machines that compute with the same model, and are not drained. Those with much free memory
        are first.
        """
        like = self.staying(self._mine().identity) - {self._name}
        return sorted(like, key=lambda name: (-self._machines[name].free_bytes, name))

    def info(self) -> dict[str, Any]:
        """Return the facts that `symphony fleet status` shows."""
        mine = self._mine()
        return {
            "name": self._fleet,
            "machine": self._name,
            "etcd": self._etcd.urls,
            "trouble": self._trouble or (HAS_LEFT if self.has_left else ""),
            "drained": sorted(self.drained),
            "machines": {
                name: {**asdict(each), "differs": each.differences(mine)}
                for name, each in sorted(self._machines.items())
            },
        }

    async def join(self) -> None:
        """Register this daemon. If etcd does not answer or is slow, say so; `run` tries again.

        Exists: another daemon has the name.
        """
        try:
            with trio.move_on_after(JOIN_S) as joining:
                await self._renew()
            if joining.cancelled_caught:
                self._fails(TimedOut(f"etcd did not register this daemon within {JOIN_S:g} s"))
        except Exists:
            raise
        except SymError as error:
            self._fails(error)

    async def run(self) -> None:
        """Stay registered and see the other machines until the task is cancelled, then leave the fleet."""
        try:
            began_s = trio.current_time()
            while True:
                # The time of a round is a part of the pause: the lease must outlive two rounds of a slow etcd.
                await trio.sleep_until(trio.current_time() + RETRY_S if self._trouble else began_s + RENEW_S)
                began_s = trio.current_time()
                try:
                    await self._renew()
                except SymError as error:
                    self._fails(error)
        finally:
            with trio.move_on_after(REVOKE_S, shield=True), suppress(SymError):  # the lease ends by itself, later
                await self._end_lease()
            self._etcd.close()

    async def leave(self) -> None:
        """Leave the fleet until the daemon starts again. The caller has set `has_left`."""
        async with self._round:
            await self._end_lease()
        await self._renew()

    async def drain(self, machine: str, *, is_on: bool) -> None:
        """Say to all machines that one is drained, or that it is not any more."""
        key = self._prefix + machine + DRAIN
        await self._in_worker(self._etcd.commit, [], [putting(key, b"") if is_on else removing(key)])
        await self._renew()

    async def _end_lease(self) -> None:
        if self._lease:
            lease, self._lease = self._lease, 0
            await self._in_worker(self._etcd.revoke, lease)

    async def _renew(self) -> None:
        """Read the records of all machines. Register if the own record is not there, else renew its lease."""
        async with self._round:
            if not await self._reads_and_registers() and not await self._reads_and_registers():
                raise SymError(f"another daemon writes the record of {self._name}", errno.EAGAIN)
        if self._trouble:
            log.info("fleet %s: etcd answers", self._fleet)
            self._trouble = ""

    async def _reads_and_registers(self) -> bool:
        """Return False if the own record has changed after it was read."""
        mine = self._mine()
        self._machines, self.drained, record = await self._in_worker(self._read)
        self.addresses.clear()
        self.addresses.update(
            (name, address(each.address)) for name, each in self._machines.items() if name != self._name
        )
        if mine.address and not self.has_left:
            if not await self._register(mine, record):
                return False
            self._machines[self._name] = mine
        return True

    def _read(self) -> tuple[dict[str, Machine], frozenset[str], Record | None]:
        """Return the machines, those that are drained, and the record of this daemon. A worker calls this: there may be
        many records.
        """
        records = {each.key.removeprefix(self._prefix): each for each in self._etcd.read(self._prefix)}
        found = ((name, machine_of(each)) for name, each in records.items() if MACHINE_NAME.fullmatch(name))
        machines = ((name, each) for name, each in found if each is not None)
        drained = (name.removesuffix(DRAIN) for name in records if name.endswith(DRAIN))
        marked = frozenset(name for name in drained if MACHINE_NAME.fullmatch(name))
        return dict(islice(machines, MAX_MACHINES)), marked, records.get(self._name)

    async def _register(self, mine: Machine, record: Record | None) -> bool:
        """Keep the record of this daemon. `record`: the present record of that name. Return False if it is not that any
        more.
        """
        other = None if record is None else machine_of(record)
        if other is not None and other.state != mine.state:
            raise Exists(
                f"the fleet {self._fleet} has another machine {self._name}, at {other.address}: choose another "
                f"`machine`; etcd forgets a machine {TTL_S} seconds after its end"
            )
        began_s = trio.current_time()
        if not self._lease or not await self._in_worker(self._etcd.renew, self._lease):
            self._lease = await self._in_worker(self._etcd.grant, TTL_S)
        self._lease_ends_s = began_s + TTL_S
        value = json.dumps(asdict(mine)).encode()
        if record is not None and (record.value, record.lease) == (value, self._lease):
            return True
        revision = 0 if record is None else record.revision
        return await self._in_worker(self._etcd.put, self._prefix + self._name, value, self._lease, revision)

    def _fails(self, error: SymError) -> None:
        if not self._trouble:
            log.warning("fleet %s: %s; the daemon goes on, and tries again", self._fleet, error)
        self._trouble = str(error)

    async def _in_worker(self, what: Callable[..., T], *arguments: object) -> T:
        return await trio.to_thread.run_sync(what, *arguments, limiter=self._workers, abandon_on_cancel=True)
