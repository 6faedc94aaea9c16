"""`symphony serve`: the daemon, and everything that it can be told."""

from __future__ import annotations

import argparse
import gc
from dataclasses import fields
from pathlib import Path

from libsym.errors import SymError
from symphony.commands.options import Commands, add_socket
from symphony.installed import misplaced_packages


def add_serve(commands: Commands) -> None:
    serve = commands.add_parser("serve", help="run the daemon: load the model, mount the KV file system")
    serve.add_argument("--model", help="smollm2 (default), tiny, a .gguf file, or a checkpoint directory")
    serve.add_argument("--mount", metavar="DIR", help="where the KV file system appears (default: /kv, or ~/kv)")
    serve.add_argument("--state", metavar="DIR", help="where the daemon keeps all files (default: /var/lib/symphony)")
    serve.add_argument(
        "--disk",
        metavar="SIZE",
        help="how much all files may take there, like 100G, those that memory has no room for, too (default: no limit)",
    )
    serve.add_argument(
        "--disk-timeout", metavar="SECONDS", help="when a call that waits for the disk is given up (default: 30)"
    )
    serve.add_argument(
        "--drain", metavar="SECONDS", help="how long writing back may take when the daemon is told to end (default: 30)"
    )
    serve.add_argument(
        "--same-bits",
        action=argparse.BooleanOptionalAction,
        help="don't open files that another instruction set computed in part",
    )
    serve.add_argument(
        "--kv-memory",
        metavar="SIZE",
        help="memory for pages, like 4G; what it has no room for is on disk alone (default: 25%% of memory)",
    )
    serve.add_argument(
        "--policy",
        metavar="P",
        help="who goes to disk first: cost (default), lru, ttl, idle, a file.py with a function rank; "
        "none: what does not fit is refused",
    )
    serve.add_argument(
        "--grace-ms",
        metavar="MS",
        help="how long programs that listen may make room before pages of theirs go to disk (default: 100; 0: not)",
    )
    serve.add_argument(
        "--pin-share", metavar="PART", help="of memory that may be pinned, each user's half of it (default: 0.5)"
    )
    serve.add_argument(
        "--quota", metavar="SIZE", help="how much each user's KV and plain files may take, like 4G (default: no limit)"
    )
    serve.add_argument(
        "--quota-files", metavar="N", type=int, help="files that each user may have (default: any number)"
    )
    serve.add_argument(
        "--quota-memory",
        metavar="SIZE",
        help="memory that each user's files, handles and calls may take (default: a quarter of what is free)",
    )
    serve.add_argument(
        "--weight",
        metavar="USER=N",
        action="append",
        help="a user's share of the steps beside others': 0.01 to 100 (default: 1); may be given several times",
    )
    serve.add_argument(
        "--programs", metavar="N", type=int, help="programs that each user may run at once (default: 1,000)"
    )
    serve.add_argument(
        "--starts", metavar="N", type=int, help="programs that each user may start in a minute (default: 6,000)"
    )
    serve.add_argument(
        "--step-ms",
        metavar="MS",
        help="how long prefills may make a step while others decode: 0.1 to 60,000 milliseconds (default: 20)",
    )
    serve.add_argument(
        "--precision", metavar="P", help="float32, bf16 (default), int8, int4 (4-bit .gguf), float16 (GPU)"
    )
    serve.add_argument("--device", metavar="D", help="what computes: cpu (default), or cuda, an NVIDIA GPU")
    serve.add_argument(
        "--gpu-memory", metavar="SIZE", help="memory of the GPU to use, like 40G (default: 90%% of what is free)"
    )
    serve.add_argument("--kv-dtype", metavar="T", help="what a GPU keeps KV in: the precision (default), or fp8")
    serve.add_argument(
        "--invariant",
        action=argparse.BooleanOptionalAction,
        help="on a GPU: the same call gives the same bits in any batch (default)",
    )
    serve.add_argument("--threads", type=int, help="threads of the decoder (default: the cores given)")
    serve.add_argument(
        "--allow-other",
        action=argparse.BooleanOptionalAction,
        help="let other users use the mount (default: when root starts the daemon)",
    )
    serve.add_argument(
        "--open",
        action=argparse.BooleanOptionalAction,
        help="let every user make files at the root of the mount (mode 1777; default: with a mount helper)",
    )
    serve.add_argument(
        "--metrics-port", metavar="N", type=int, help="tell metrics to Prometheus on this TCP port of localhost, too"
    )
    serve.add_argument("--config", type=Path, metavar="FILE", help="a symphony.toml with the same names as keys")
    serve.add_argument(
        "--mount-helper", metavar="PATH", help="the socket of the helper that mounts for a daemon without rights"
    )
    serve.add_argument(
        "--watchdog",
        metavar="SECONDS",
        help="how long a step may take before the service manager ends the daemon (default: 60)",
    )
    serve.add_argument("--log", metavar="KIND", help="lines of the log: text, json, journal, or auto (default)")
    serve.add_argument("-v", "--verbose", action="store_true", default=None, help="log connections and files, too")
    add_socket(serve)
    serve.set_defaults(action=_serve)


def _serve(args: argparse.Namespace) -> int:
    for conflict in misplaced_packages():
        raise SymError(conflict)
    gc.disable()  # until the daemon is built, see `serve`: modules are no garbage
    # The other commands start in a tenth of a second because only this one brings the daemon.
    import trio  # noqa: PLC0415

    from symphony.config import Config, default_file  # noqa: PLC0415
    from symphony.daemon import serve  # noqa: PLC0415
    from symphony.logs import set_up_log  # noqa: PLC0415
    from symphony.reloading import Source  # noqa: PLC0415

    names = {field.name for field in fields(Config)}  # the options have the names of the keys
    told = {name: value for name, value in vars(args).items() if name in names and value is not None}
    source = Source(args.config or default_file(), told)
    config = source.read()
    set_up_log(config.log, verbose=config.verbose)
    try:
        trio.run(serve, config, source)
    except BaseExceptionGroup as group:
        ours, others = group.split(SymError)
        if ours is None or others is not None:
            raise
        raise _first(ours) from None
    return 0


def _first(group: BaseExceptionGroup[SymError]) -> SymError:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
