"""The keys of the configuration. `Config` is their table: each field states everything about one key.

`symphony serve` has an option for each key. `loading.py` merges the options with the configuration file. From the
table, `described.py` writes the file that is installed, and the list in symphony.toml(5).
"""

# ruff: noqa: RUF009 - `_setting` makes the fields
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from decoder.model_config import GPU_KV_DTYPE, GPU_PRECISIONS, KV_DTYPE
from scheduler.programs.admission import MAX_AT_ONCE, MAX_PER_MINUTE
from symphony.settings import kinds
from symphony.settings.kinds import Kind, number, one_of, text, whole

DEVICES = "cpu", "cuda"
NO_POLICY = "none"
POLICIES = "cost", "lru", "ttl", "idle", NO_POLICY
"""Names of tier policies: the names in `kvfs.tiers.loading`, and `none`. This module does not import that module, whose
import of numpy would slow the start of every command.
"""


@dataclass(frozen=True, slots=True)
class Setting:
    """Facts of one key."""

    default: Any
    kind: Kind
    otherwise: str = ""
    """Description of the default, which the help shows instead of `default`. Empty: the help shows `default`."""
    example: Any = None
    """Value that the installed file shows for a key without a default value."""
    reload: bool = False
    """Whether a reload can change the key while the daemon runs."""
    text: str = ""

    def about(self) -> str:
        """Return the text, with the possible values."""
        return f"{self.text}: {self.kind.possible}" if self.kind.possible else self.text

    def help(self) -> str:
        """Return the help of the key's option."""
        about, default = self.about(), self.otherwise or self.default
        if isinstance(default, bool):
            default = "yes" if default else "no"
        elif isinstance(default, int | float):
            default = f"{default:,g}"
        return f"{about[0].lower()}{about[1:]} (default: {default})".replace("%", "%%")


def _setting(default: Any, *of_it: Any, **named: Any) -> Any:
    return field(default_factory=lambda: default, metadata={"setting": Setting(default, *of_it, **named)})


@dataclass(frozen=True, slots=True)
class Config:
    """The values of all keys."""

    # fmt: off
    model: str = _setting("smollm2", kinds.MODEL,
        text="The model: smollm2, tiny (for tests), a .gguf file, or the directory of a Hugging Face checkpoint; "
        "NAME=MODEL gives it a name")
    precision: str = _setting("bf16", text("P", *dict.fromkeys((*KV_DTYPE, *GPU_PRECISIONS, "auto"))),
        text="Precision of the arithmetic: float32, bf16, int8, int4, auto; on a GPU float32, bf16, float16")
    threads: int | None = _setting(None, whole("at least 1", 1), "the cores that the daemon may use", 2,
        text="Threads of the decoder")
    device: str = _setting("cpu", text("D", *DEVICES),
        text="Device that computes: cpu, or cuda (an NVIDIA GPU; the service needs a drop-in for it)")
    gpu_memory: int | None = _setting(None, kinds.SIZE, "nine tenths of the free memory", "40G",
        text="With cuda: memory of the GPU for weights, workspace and pages")
    kv_dtype: str | None = _setting(None, text("T", *GPU_KV_DTYPE), "the precision", "bf16",
        text="With cuda: number type of KV, either the type of the precision or fp8")
    invariant: bool = _setting(True, kinds.TRUTH,
        text="With cuda: the same call has the same bits in any batch")
    same_bits: bool = _setting(False, kinds.TRUTH,
        text="Refuse to open files that another instruction set computed in part")

    mount: Path = _setting(Path("/kv"), kinds.MOUNT, "/kv for root, ~/kv for other users",
        text="Where the KV file system appears; the mount helper's unit names the same directory")
    socket: Path = _setting(Path("/run/symphony/symphony.sock"), kinds.PATH, "SYMPHONY_SOCKET, or the user's socket",
        text="The daemon's socket; the socket's unit names the same path")
    state: Path = _setting(Path("/var/lib/symphony"), kinds.DIRECTORY,
        "/var/lib/symphony for root, ~/.local/state/symphony for others",
        text="Where the daemon keeps all files; each daemon needs its own")
    weights_cache: Path | None = _setting(None, kinds.CACHE, "~/.cache/symphony; the unit names its own",
        "/var/cache/symphony",
        text='Directory of packed weights, so that the next start need not pack them; with "", none are kept')
    allow_other: bool | None = _setting(None, kinds.TRUTH, "true for root and with the helper", True,
        text="Let users other than the daemon's enter the mount, as far as modes allow")
    open: bool = _setting(False, kinds.TRUTH,
        text="Let every user make files at the root of the mount (mode 1777); with the helper, always true")
    mount_helper: Path | None = _setting(None, kinds.PATH, "none", "/run/symphony-mount/symphony.sock",
        text="The socket of the helper that mounts for a daemon without rights; the units say where it is")

    kv_memory: int | None = _setting(None, kinds.SIZE, "a quarter of the free memory at the start", "4G",
        text="Memory for pages; further pages are on disk alone")
    disk: int | None = _setting(None, kinds.SIZE, "the size of the file system", "100G", reload=True,
        text="How much all files may take below the state directory, including pages that memory has no room for")
    policy: str = _setting("cost", one_of("P", *POLICIES, suffix=".py"), reload=True,
        text="Policy that chooses the files whose pages go to disk first (with none, calls that do not fit are "
            "refused; a change from or to none needs a restart)")
    grace_ms: float = _setting(100.0, number("milliseconds", "MS", 0.0, 60_000.0), reload=True,
        text="Time that programs in kv_pressure() get to free memory before pages of their files go to disk")
    pin_share: float = _setting(0.5, number("number", "PART", 0.0, 1.0), reload=True,
        text="Share of the KV memory that advice may pin; each user may pin half of that share")
    disk_timeout: float = _setting(30.0, kinds.SECONDS, reload=True,
        text="How long a call may wait for the disk before it fails with ETIMEDOUT")
    drain: float = _setting(30.0, kinds.SECONDS, reload=True,
        text="How long writing back may take at the end of the daemon; TimeoutStopSec= of the unit must be longer")

    step_ms: float = _setting(20.0, number("milliseconds", "MS", 0.1, 60_000.0), reload=True,
        text="Time limit of steps with decodes and prefills; in a burst of prefills up to 50 times as long")
    watchdog: float = _setting(60.0, kinds.SECONDS, reload=True,
        text="How long a step may take before the service manager's watchdog restarts the daemon")

    quota: int | None = _setting(None, kinds.SIZE, "no limit", "4G", reload=True,
        text="How much each user's KV and plain files may take")
    quota_files: int | None = _setting(None, whole("at least 1", 1), "no limit", 100_000, reload=True,
        text="How many files, directories and links each user may have")
    quota_memory: int | None = _setting(None, kinds.SIZE, "a quarter of the free memory", "1G", reload=True,
        text="How much of the daemon's own memory each user's files, handles and calls may fill")
    weight: Mapping[int, float] = _setting({}, kinds.WEIGHTS, "1", {"alice": 2.0}, reload=True,
        text="Weight of each user, by name or uid, in the sharing of steps")
    programs: int = _setting(MAX_AT_ONCE, kinds.ANY_NUMBER, reload=True,
        text="How many programs, started by symphony run, each user may have at the same time")
    starts: int = _setting(MAX_PER_MINUTE, kinds.ANY_NUMBER, reload=True,
        text="How many programs each user may start in a minute")

    peers: tuple[str, ...] = _setting((), kinds.PEERS, "none", ["east=10.0.0.2:7313"],
        text="Daemons on other machines from which programs may fetch files: the name in the daemon's certificate, and "
            "its address")
    peer_listen: str | None = _setting(None, kinds.ADDRESS, "none", "10.0.0.1:7313",
        text="Address at which peers may fetch files")
    peer_keys: Path | None = _setting(None, kinds.DIRECTORY, "peers below the state directory", "/etc/symphony/peers",
        text="Directory of the certificates that peers show each other: see symphony-fleet(1)")
    etcd: tuple[str, ...] = _setting((), kinds.ENDPOINTS, "none", ["https://10.0.0.1:2379"],
        text="Endpoints of the etcd in which machines of a fleet find each other; http only for 127.0.0.1")
    etcd_keys: Path | None = _setting(None, kinds.DIRECTORY, "the directory of peer_keys", "/etc/symphony/etcd",
        text="Directory of the certificates for etcd, as for peers")
    machine: str | None = _setting(None, kinds.NAME, "the host's name", "east",
        text="Name of this machine in the fleet: the name in its certificate for peers")
    fleet: str = _setting("default", kinds.NAME,
        text="Name of the fleet; machines of other fleets may use the same etcd")
    copies: int = _setting(2, whole("1 to 16", 1, 16),
        text="Number of machines that have a file of the fleet on disk when a sync of the file returns")
    fleet_store: str | None = _setting(None, kinds.ADDRESS, "none", "10.0.0.3:50051",
        text="Master of the Mooncake Store that the fleet uses as a cache of pages: see symphony-fleet(1)")
    fleet_store_memory: int | None = _setting(None, kinds.SIZE, "1G", "4G",
        text="Memory that this machine gives to fleet_store")
    fleet_events: str | None = _setting(None, kinds.EVENTS, "none", "tcp://127.0.0.1:5557",
        text="Endpoint of ZeroMQ at which routers learn which pages of files that all users may read are here, without "
            "a password: see symphony-fleet-events(7)")

    log: str = _setting("auto", one_of("KIND", "auto", "text", "json", "journal"), reload=True,
        text="Format of the log (auto: journal if standard error is the journal's, else text)")
    verbose: bool = _setting(False, kinds.FLAG, reload=True,
        text="Also log connections and files, and write every line that repeats")
    metrics_port: int | None = _setting(None, kinds.PORT, "none", 9464,
        text="Port of localhost, by TCP, for /metrics in Prometheus' format; 0 is any free port")
    # fmt: on


SETTINGS: Mapping[str, Setting] = {each.name: each.metadata["setting"] for each in fields(Config)}
