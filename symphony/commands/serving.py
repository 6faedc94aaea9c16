"""`symphony serve`: the daemon, with an option for each key of its configuration."""

from __future__ import annotations

import argparse
import gc
import signal
from pathlib import Path

from libsym.errors import SymError
from symphony.checks.installed import misplaced_packages
from symphony.commands.options import Commands
from symphony.settings.config import SETTINGS
from symphony.settings.loading import default_file


def add_serve(commands: Commands) -> None:
    serve = commands.add_parser("serve", help="run the daemon: load the model, mount the KV file system")
    for key, setting in SETTINGS.items():
        letter = ["-v"] * (key == "verbose")
        serve.add_argument(*letter, f"--{key.replace('_', '-')}", help=setting.help(), **setting.kind.option)
    serve.add_argument("--config", type=Path, metavar="FILE", help="a symphony.toml with the same names as keys")
    serve.set_defaults(action=_serve)


def _serve(args: argparse.Namespace) -> int:
    for conflict in misplaced_packages():
        raise SymError(conflict)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a KeyboardInterrupt in a callback of an import would be lost
    gc.disable()  # imports leave no garbage; `_nothing_is_garbage` enables collections again
    # Only this command imports the daemon, so that the other commands start in a tenth of a second.
    import trio  # noqa: PLC0415

    from symphony.daemon.daemon import serve  # noqa: PLC0415
    from symphony.daemon.logs import set_up_log  # noqa: PLC0415
    from symphony.daemon.reloading import Source  # noqa: PLC0415

    told = {key: value for key, value in vars(args).items() if key in SETTINGS and value is not None}
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
