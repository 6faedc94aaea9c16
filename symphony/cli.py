"""The command line: `symphony serve | run | stat | du | doctor`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

import libsym
from libsym.errors import SymError
from symphony.doctor import checks, print_report
from symphony.launch import run_program
from symphony.reports import du_lines, stat_lines


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `symphony` command."""
    parser = build_parser()
    args = parser.parse_args(argv)
    action: Callable[[argparse.Namespace], int] = args.action
    try:
        return action(args)
    except SymError as error:
        print(f"symphony: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # `symphony du | head` is no error
        return 1
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    """The whole grammar of the command line."""
    parser = argparse.ArgumentParser(prog="symphony", description="An operating system for LLM inference programs.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="run the daemon: load the model, mount the KV file system")
    serve.add_argument("--model", help="smollm2 (default), tiny, a .gguf file, or a checkpoint directory")
    serve.add_argument("--mount", metavar="DIR", help="where the KV file system appears (default: /kv, or ~/kv)")
    serve.add_argument("--state", metavar="DIR", help="where the daemon keeps plain files and its lock")
    serve.add_argument("--kv-memory", metavar="SIZE", help="size of the page pool, like 4G (default: 25%% of memory)")
    serve.add_argument(
        "--quota", metavar="SIZE", help="how much each user's KV and plain files may take, like 4G (default: no limit)"
    )
    serve.add_argument(
        "--quota-files", metavar="N", type=int, help="files that each user may have (default: any number)"
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

    run = commands.add_parser("run", help="run a Python program beside the model")
    _add_socket(run)
    run.add_argument("program", metavar="PROG")
    run.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER)
    run.set_defaults(action=lambda args: run_program(args.program, args.arguments, _socket(args)))

    stat = commands.add_parser("stat", help="what the daemon is doing")
    _add_socket(stat)
    _add_json(stat)
    stat.set_defaults(action=_stat)

    du = commands.add_parser("du", help="what files own alone and what they share")
    _add_socket(du)
    _add_json(du)
    du.add_argument("path", nargs="?", default=".", help="a file or directory of the mount (default: all of it)")
    du.set_defaults(action=_du)

    doctor = commands.add_parser("doctor", help="check this machine, and say what to do")
    _add_socket(doctor)
    _add_json(doctor)
    doctor.set_defaults(action=_doctor)
    return parser


def _add_socket(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--socket", metavar="PATH", help="the daemon's socket (default: SYMPHONY_SOCKET, or the user's)"
    )


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON for scripts")


def _socket(args: argparse.Namespace) -> Path | None:
    return Path(args.socket).absolute() if args.socket else None


def _serve(args: argparse.Namespace) -> int:
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


def _du(args: argparse.Namespace) -> int:
    _connect(args)
    usage = libsym.kv_du(args.path)
    page_bytes = libsym.daemon_stat()["page_bytes"]
    print(json.dumps(usage, indent=2) if args.json else "\n".join(du_lines(usage, page_bytes)))
    return 0


def _doctor(args: argparse.Namespace) -> int:
    if args.socket:
        os.environ["SYMPHONY_SOCKET"] = str(_socket(args))
    return print_report(checks(), as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
