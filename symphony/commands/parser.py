"""The parser of the command line: it answers a mistake with the usage of that command, or with a name that is near."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from libsym.command_line import did_you_mean, unrecognized


class Parser(argparse.ArgumentParser):
    """A parser of `symphony` or of one of its commands."""

    def parse_known_args(  # type: ignore[override] # argparse has overloads for namespaces of other classes
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Refuses unknown arguments in the parser that has met them: argparse would leave them to the whole command."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(unrecognized(self, unknown))
        return found, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:  # noqa: SLF001 - it has no other name
            from symphony.launcher.finding import shipped  # noqa: PLC0415 - a slip alone needs it

            hint = did_you_mean(value, action.choices) or f": `{self.prog} --help` lists them"
            if "run" in action.choices and value in shipped():
                hint = f": did you mean run {value}?"
            self.exit(2, f"{self.prog}: there is no command {value!r}{hint}\n")
        super()._check_value(action, value)
