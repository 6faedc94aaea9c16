"""All scenarios, in the order in which they run on one machine."""

from __future__ import annotations

from installing import install, install_again, older_state, purge, rollback, security, uninstall, upgrade
from serving import (
    activated,
    full_disk,
    killed,
    program,
    ready,
    reload,
    second_daemon,
    seen,
    stale_mount,
    stopped,
    watchdog,
)
from units import gateway, instance, program_unit, user_unit

ALWAYS = (install,)
"""Scenarios that every run needs: the other ones depend on them."""
SHORT = (install, ready, killed, uninstall)
SCENARIOS = (
    install,
    security,
    ready,
    seen,
    program,
    killed,
    watchdog,
    reload,
    stopped,
    activated,
    second_daemon,
    stale_mount,
    full_disk,
    user_unit,
    instance,
    program_unit,
    gateway,
    install_again,
    rollback,
    uninstall,
    upgrade,
    older_state,
    purge,
)
