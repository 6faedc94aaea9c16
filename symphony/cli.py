"""The command line: `symphony serve | stat | du | sync | fsck | scrub | trace | doctor`, and those on programs."""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import libsym
from libsym.errors import SymError
from symphony.doctor import checks, print_report
from symphony.launcher.places import Refused
from symphony.program_options import add_program_commands
from symphony.reports import disk_lines, du_lines, stat_lines

MAX_TRACE_S = 366 * 24 * 3600


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `symphony` command."""
    _open_closed_streams()
    parser = build_parser()
    args = parser.parse_args(argv)
    action: Callable[[argparse.Namespace], int] = args.action
    try:
        return action(args)
    except SymError as error:
        print(f"symphony: {error}", file=sys.stderr)
        return 1
    except Refused as refused:
        print(f"symphony: {refused}", file=sys.stderr)
        return refused.status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # `symphony du | head` is no error
        return 1
    except KeyboardInterrupt:
        return 130


def _open_closed_streams() -> None:
    """Else the first socket would be standard input, and be read and written as that."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def build_parser() -> argparse.ArgumentParser:
    """The whole grammar of the command line."""
    parser = argparse.ArgumentParser(prog="symphony", description="An operating system for LLM inference programs.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="run the daemon: load the model, mount the KV file system")
    serve.add_argument("--model", help="smollm2 (default), tiny, a .gguf file, or a checkpoint directory")
    serve.add_argument("--mount", metavar="DIR", help="where the KV file system appears (default: /kv, or ~/kv)")
    serve.add_argument("--state", metavar="DIR", help="where the daemon keeps all files (default: /var/lib/symphony)")
    serve.add_argument(
        "--disk", metavar="SIZE", help="how much all files may take there, like 100G (default: no limit)"
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
    serve.add_argument("--kv-memory", metavar="SIZE", help="size of the page pool, like 4G (default: 25%% of memory)")
    serve.add_argument(
        "--quota", metavar="SIZE", help="how much each user's KV and plain files may take, like 4G (default: no limit)"
    )
    serve.add_argument(
        "--quota-files", metavar="N", type=int, help="files that each user may have (default: any number)"
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
    serve.add_argument("--config", type=Path, metavar="FILE", help="a symphony.toml with the same names as keys")
    serve.add_argument("-v", "--verbose", action="store_true", help="log connections and files, too")
    _add_socket(serve)
    serve.set_defaults(action=_serve)

    add_program_commands(commands, _add_socket, _socket)

    stat = commands.add_parser("stat", help="what the daemon is doing")
    _add_socket(stat)
    _add_json(stat)
    stat.set_defaults(action=_stat)

    sync = commands.add_parser("sync", help="return when everything on the mount would survive a power cut")
    _add_socket(sync)
    sync.set_defaults(action=_sync)

    du = commands.add_parser("du", help="what files own alone and what they share")
    _add_socket(du)
    _add_json(du)
    du.add_argument("path", nargs="?", default=".", help="a file or directory of the mount (default: all of it)")
    du.add_argument("--disk", action="store_true", help="what files take on disk, instead")
    du.set_defaults(action=_du)

    _add_checks(commands)
    _add_trace(commands)
    return parser


def _add_checks(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """What looks whether all is well."""
    fsck = commands.add_parser("fsck", help="look for damage in what is kept on disk, and keep the rest")
    _add_socket(fsck)
    _add_json(fsck)
    fsck.add_argument(
        "--state", metavar="DIR", help="a state that no daemon uses (default: ask the daemon, if there is)"
    )
    fsck.add_argument("--repair", action="store_true", help="mend what can be mended; what is damaged goes")
    fsck.add_argument("--quick", action="store_true", help="do not read pages")
    fsck.set_defaults(action=_fsck)

    scrub = commands.add_parser("scrub", help="have the daemon read everything that it keeps on disk")
    _add_socket(scrub)
    _add_json(scrub)
    scrub.add_argument("--rate", metavar="SIZE", default="50M", help="bytes a second at most (default: 50M)")
    scrub.set_defaults(action=_scrub)

    doctor = commands.add_parser("doctor", help="check this machine, and say what to do")
    _add_socket(doctor)
    _add_json(doctor)
    doctor.set_defaults(action=_doctor)


def _add_trace(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """What the scheduler does, to be looked at later."""
    trace = commands.add_parser("trace", help="record what the scheduler decides, and draw it")
    parts = trace.add_subparsers(required=True, metavar="WHAT")

    record = parts.add_parser("record", help="write a trace until Ctrl-C")
    _add_socket(record)
    record.add_argument(
        "-o", "--output", metavar="FILE", type=Path, default=Path("symphony.trace"), help="default: symphony.trace"
    )
    record.add_argument("--seconds", metavar="N", type=_seconds, help="end after so long")
    record.set_defaults(action=lambda args: _tracing().record_command(args, _socket(args)))

    show = parts.add_parser("show", help="draw a trace as one HTML page")
    show.add_argument("file", metavar="FILE", type=Path)
    show.add_argument("-o", "--output", metavar="PAGE", type=Path, help="default: as FILE, with the suffix .html")
    show.set_defaults(action=lambda args: _tracing().show_command(args))

    dump = parts.add_parser("dump", help="print a trace, one JSON object a line")
    dump.add_argument("file", metavar="FILE", type=Path)
    dump.set_defaults(action=lambda args: _tracing().dump_command(args))

    summary = parts.add_parser("summary", help="print what a trace comes to")
    _add_json(summary)
    summary.add_argument("file", metavar="FILE", type=Path)
    summary.set_defaults(action=lambda args: _tracing().summary_command(args))


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= MAX_TRACE_S:
        raise argparse.ArgumentTypeError(f"{text} seconds: give more than 0, and {MAX_TRACE_S} at most")
    return seconds


def _tracing() -> ModuleType:
    from symphony import tracing  # noqa: PLC0415 - numpy

    return tracing


def _add_socket(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--socket", metavar="PATH", help="the daemon's socket (default: SYMPHONY_SOCKET, or the user's)"
    )


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON for scripts")


def _socket(args: argparse.Namespace) -> Path | None:
    return Path(args.socket).absolute() if args.socket else None


def _serve(args: argparse.Namespace) -> int:
    gc.disable()  # until the daemon is built, see `serve`: modules are no garbage
    # The other commands start in a tenth of a second because only this one brings the daemon.
    import trio  # noqa: PLC0415

    from symphony.config import Config, load  # noqa: PLC0415
    from symphony.daemon import serve  # noqa: PLC0415
    from symphony.logs import log_to_stderr  # noqa: PLC0415

    log_to_stderr(verbose=args.verbose)
    names = {field.name for field in fields(Config)}  # the options have the names of the keys
    config = load(args.config, {name: value for name, value in vars(args).items() if name in names})
    try:
        trio.run(serve, config)
    except BaseExceptionGroup as group:
        ours, others = group.split(SymError)
        if ours is None or others is not None:
            raise
        raise _first(ours) from None
    return 0


def _first(group: BaseExceptionGroup[SymError]) -> SymError:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


def _connect(args: argparse.Namespace) -> None:
    socket = _socket(args)
    libsym.connect(str(socket) if socket else None)


def _stat(args: argparse.Namespace) -> int:
    _connect(args)
    info = libsym.daemon_stat()
    print(json.dumps(info, indent=2) if args.json else "\n".join(stat_lines(info)))
    return 0


def _sync(args: argparse.Namespace) -> int:
    _connect(args)
    libsym.kv_sync()
    return 0


def _du(args: argparse.Namespace) -> int:
    _connect(args)
    usage = libsym.kv_du(args.path)
    page_bytes = libsym.daemon_stat()["page_bytes"]
    lines = disk_lines(usage) if args.disk else du_lines(usage, page_bytes)
    print(json.dumps(usage, indent=2) if args.json else "\n".join(lines))
    return 0


def _fsck(args: argparse.Namespace) -> int:
    from symphony.checking import fsck_command  # noqa: PLC0415 - numpy, and all that keeps files

    return fsck_command(args, _socket(args))


def _scrub(args: argparse.Namespace) -> int:
    from symphony.checking import scrub_command  # noqa: PLC0415 - as above

    return scrub_command(args, _socket(args))


def _doctor(args: argparse.Namespace) -> int:
    if args.socket:
        os.environ["SYMPHONY_SOCKET"] = str(_socket(args))
    return print_report(checks(), as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
