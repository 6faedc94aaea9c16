"""The command line of the gateway."""

from __future__ import annotations

import argparse
import math
import sys
from functools import partial
from pathlib import Path

import libsym as sym

try:
    from lips.gateway import log
    from lips.gateway.gateway import Settings
    from lips.gateway.keys import VARIABLE, KeyFile, KeyFileError, Keys, new_key, one_key
    from lips.gateway.server import LOOPBACKS, listening, serve
except ModuleNotFoundError as error:
    raise SystemExit(f"gateway needs the package {error.name}: pip install 'symphony-os[gateway]'") from None


def main() -> None:
    options = _parser().parse_args()
    try:
        if options.new_key:
            key, line = new_key(options.new_key)
            print(key, flush=True)
            print(line, file=sys.stderr, flush=True)
            return
        keys: Keys = KeyFile(options.keys) if options.keys else one_key(options.key_file)
    except KeyFileError as error:
        sys.exit(f"gateway: {error}")
    log.set_up(options.log)
    listeners, absent = listening(options.host or LOOPBACKS, options.port)
    settings = Settings(
        directory=options.directory,
        max_body_bytes=options.max_body,
        body_s=options.body_timeout,
        answer_s=options.timeout,
        max_running=options.max_running,
        max_waiting=options.max_waiting,
        is_strict=options.strict,
    )
    sym.main(partial(serve, listeners, absent, settings, keys))


def _parser() -> argparse.ArgumentParser:
    default = Settings()
    parser = argparse.ArgumentParser(prog="gateway", description="Serves the usual HTTP interfaces of language models.")
    parser.add_argument(
        "--host", action="append", help=f"address to listen on, and more (default: {' and '.join(LOOPBACKS)})"
    )
    parser.add_argument("--port", type=port, default=8080, help="port to listen on, 0 for any (default: %(default)s)")
    parser.add_argument("--log", choices=log.FORMS, default="text", help="form of its lines (default: %(default)s)")
    parser.add_argument("--directory", metavar="PATH", help="of conversations, on the mount (default: gateway-UID)")
    keys = parser.add_mutually_exclusive_group()
    keys.add_argument("--keys", type=Path, metavar="FILE", help="the keys that are answered: see lips(7)")
    keys.add_argument(
        "--key-file",
        type=Path,
        metavar="FILE",
        help=f"the one key that is answered (default: {VARIABLE}, else one that is made and kept)",
    )
    keys.add_argument("--new-key", metavar="NAME", help="print a new key, and its line of FILE on standard error")
    parser.add_argument("--strict", action="store_true", help="refuse requests with unknown fields")
    for name, value, what in (
        ("--max-body", default.max_body_bytes, "bytes of a request at most"),
        ("--max-running", default.max_running, "answers at once"),
        ("--max-waiting", default.max_waiting, "requests that wait for their turn"),
    ):
        parser.add_argument(name, type=count, default=value, metavar="N", help=f"{what} (default: {value})")
    parser.add_argument(
        "--body-timeout",
        type=seconds,
        default=default.body_s,
        metavar="S",
        help="seconds that a request's body may take (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=default.answer_s,
        metavar="S",
        help="seconds of an answer (default: %(default)s)",
    )
    return parser


def port(text: str) -> int:
    number = int(text)
    if not 0 <= number < 1 << 16:
        raise argparse.ArgumentTypeError("0 to 65535")
    return number


def seconds(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError("more than 0")
    return number


def count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("1 or more")
    return number


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(f"gateway: {error.filename or ''}{': ' if error.filename else ''}{error.strerror}")
