"""The parser of the command line. On a mistake, the parser prints the command's usage, or suggests a similar name."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from libsym.tools.command_line import did_you_mean, unrecognized


class Parser(argparse.ArgumentParser):
    """Parser of `symphony` or of one of its commands."""

    def parse_known_args(  # type: ignore[override] # argparse has overloads for namespaces of other classes
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Refuse unknown arguments in the parser that finds them. argparse would let the parent parser report them."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(unrecognized(self, unknown))
        return found, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:  # noqa: SLF001 - it has no other name
            from symphony.launcher.common.finding import shipped  # noqa: PLC0415 - only a wrong command needs it

            hint = did_you_mean(value, action.choices) or f": `{self.prog} --help` lists them"
            if "run" in action.choices and value in shipped():
                hint = f": did you mean run {value}?"
            self.exit(2, f"{self.prog}: there is no command {value!r}{hint}\n")
        super()._check_value(action, value)
