"""The command line of the gateway."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import libsym as sym

try:
    from lips import gateway
    from lips.gateway import log
    from lips.gateway.gateway import Settings
    from lips.gateway.keys import VARIABLE, KeyFile, KeyFileError, Keys, new_key, one_key
    from lips.gateway.server import LOOPBACKS, listening, serve
except ModuleNotFoundError as error:
    raise SystemExit(f"gateway needs the package {error.name}: pip install 'symphony-os[gateway]'") from None

SHORTEST_S = 0.001
"""The smallest time limit that an option accepts."""


def main() -> None:
    arguments = _arguments()
    options = arguments.parse_args()
    if [options.keys, options.key_file, options.new_key].count(None) < 2:
        arguments.error("give only one of --keys, --key-file and --new-key")
    try:
        if options.new_key:
            key, line = new_key(options.new_key)
            print(key, flush=True)
            print(line, file=sys.stderr, flush=True)
            return
        key_file = options.key_file and Path(options.key_file)
        keys: Keys = KeyFile(Path(options.keys)) if options.keys else one_key(key_file)
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
        wait_s=options.max_wait,
        is_strict=options.strict,
    )
    sym.main(partial(serve, listeners, absent, settings, keys))


def _arguments() -> sym.Arguments:
    default, arguments = Settings(), sym.Arguments(gateway.__doc__)
    arguments.text("--host", f"address to listen on, and more (default: {' and '.join(LOOPBACKS)})", action="append")
    arguments.whole("--port", "port to listen on, 0 for any", 8080, least=0, most=65535)
    arguments.add_argument("--log", choices=log.FORMS, default="text", help="form of the log (default: %(default)s)")
    arguments.kv("--directory", "of conversations, on the mount (default: gateway-UID)", metavar="PATH")
    arguments.text("--keys", "file of accepted keys: see lips-gateway(7)", metavar="FILE")
    arguments.text(
        "--key-file",
        f"file with the one accepted key (default: {VARIABLE}, else a key that is made and kept)",
        metavar="FILE",
    )
    arguments.text(
        "--new-key", "print a new key, and on standard error its line for the file of --keys", metavar="NAME"
    )
    arguments.add_argument("--strict", action="store_true", help="refuse requests with unknown fields")
    arguments.whole("--max-body", "bytes of a request at most", default.max_body_bytes, metavar="N")
    arguments.whole("--max-running", "answers at once", default.max_running, metavar="N")
    arguments.whole("--max-waiting", "requests that wait for their turn", default.max_waiting, metavar="N")
    arguments.number("--max-wait", "seconds of a wait for a turn", default.wait_s, least=SHORTEST_S, metavar="S")
    arguments.number(
        "--body-timeout", "seconds that a request's body may take", default.body_s, least=SHORTEST_S, metavar="S"
    )
    arguments.number("--timeout", "seconds of an answer", default.answer_s, least=SHORTEST_S, metavar="S")
    return arguments


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(f"gateway: {error.filename or ''}{': ' if error.filename else ''}{error.strerror}")
