"""Network of machines that can be cut off: a namespace for each machine, and a bridge between them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

CUTS = ("carrier", "silence", "etcd", "peer")
"""Kinds of partitions: the machine sees that its cable is out; it does not see it; only etcd is away; only one peer."""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Network:
    """Namespaces of machines. The bridge, where etcd listens, belongs to the namespace of this process."""

    def __init__(self, machines: Sequence[str]) -> None:
        """Make the network. CalledProcessError: this process may not, or there is no ip(8)."""
        tag, part = f"syf{os.getpid()}", os.getpid() % 250
        self._bridge, self._part = f"{tag}b", f"10.213.{part}"
        self._spaces = {name: f"{tag}-{name}" for name in machines}
        self._links = {name: f"{tag}{number}" for number, name in enumerate(machines)}
        self.etcd = f"{self._part}.1"
        self.addresses = {name: f"{self._part}.{number}" for number, name in enumerate(machines, 2)}
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("addr", "add", f"{self.etcd}/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            for name in machines:
                self._add(name)
        except BaseException:
            self.close()
            raise

    def _add(self, name: str) -> None:
        space, link = self._spaces[name], self._links[name]
        _ip("netns", "add", space)
        _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("link", "set", link, "master", self._bridge, "up")
        _ip("-n", space, "addr", "add", f"{self.addresses[name]}/24", "dev", "eth0")
        for inside in ("lo", "eth0"):
            _ip("-n", space, "link", "set", inside, "up")

    def inside(self, name: str) -> list[str]:
        """Return the beginning of a command that runs in a machine's namespace, with the mounts of this process."""
        return ["nsenter", f"--net={Path('/run/netns') / self._spaces[name]}"]

    def cut(self, name: str, kind: str, peer: str) -> None:
        """Begin a partition."""
        match kind:
            case "carrier":
                _ip("link", "set", self._links[name], "down")
            case "silence":
                _ip("link", "set", self._links[name], "nomaster")
            case _:
                away = self.etcd if kind == "etcd" else self.addresses[peer]
                _ip("-n", self._spaces[name], "route", "add", "blackhole", f"{away}/32")

    def heal(self, name: str, kind: str, peer: str) -> None:
        """End a partition."""
        match kind:
            case "carrier":
                _ip("link", "set", self._links[name], "up")
            case "silence":
                _ip("link", "set", self._links[name], "master", self._bridge)
            case _:
                away = self.etcd if kind == "etcd" else self.addresses[peer]
                _ip("-n", self._spaces[name], "route", "del", "blackhole", f"{away}/32")

    def close(self) -> None:
        """Remove the network. Processes in the namespaces must have ended."""
        for words in (
            *(("netns", "del", space) for space in self._spaces.values()),
            *(("link", "del", link) for link in (*self._links.values(), self._bridge)),
        ):
            with suppress(subprocess.CalledProcessError):
                _ip(*words)
