"""Scenarios of the installation: a first installation, an upgrade, a rollback, a removal."""

from __future__ import annotations

import re
import tarfile
import time

from kept import REPOSITORY
from running import CONFIG, FILES, FILES_BEFORE, INSTALL, PYTHON, TINY, UNINSTALL, Service

MAX_EXPOSURE = 2.5
OLD = "/opt/symphony-0.1.0/bin"
OLD_UNIT = f"""[Service]
ExecStart={OLD}/symphony serve --model tiny --kv-memory 256M
"""
"""Unit for release 0.1.0, which has no units of its own. The daemon runs as root."""
STATE = "/var/lib/symphony"
PLANTED = REPOSITORY / "tests/kvfs/durable/formats/1.tar.xz"
ROLLBACK = "/root/symphony/scripts/install --rollback"
FORMAT = (
    f"import sqlite3; index = sqlite3.connect('{STATE}/index.db');"
    " now = index.execute('PRAGMA user_version').fetchone()[0]"
)


def install(s: Service) -> str:
    """Install the service by a single command, with the default model."""
    began_s = time.monotonic()
    s.run(INSTALL)
    took_s = time.monotonic() - began_s
    s.expect(s.run("systemctl is-active symphony.service") == "active", "symphony.service is not active")
    model = s.stat()["model"]
    s.run("man --where 1 symphony-serve; man --where 5 symphony.toml; man --where 7 kvfs")
    places = "bash-completion/completions/symphony zsh/site-functions/_symphony fish/vendor_completions.d/symphony.fish"
    completions = s.run(f"cd /usr/local/share && ls {places}")
    facts = [
        f"{INSTALL}: {took_s:.0f} s, and the service is there",
        f"{s.run('symphony --version')}, model {model}, {s.run('du -sh /opt/symphony')}",
        *completions.splitlines(),
    ]
    s.configure(TINY)
    s.run("systemctl restart symphony.service")
    return "\n".join(facts)


def security(s: Service) -> str:
    said = s.run("systemd-analyze security --no-pager symphony.service")
    found = re.search(r"Overall exposure level for symphony\.service: ([0-9.]+)", said)
    s.expect(found is not None and float(found[1]) < MAX_EXPOSURE, f"exposed: {said}")
    helper = s.run("systemd-analyze security --no-pager symphony-mount.service | tail -n 1")
    return f"{said}\n{helper}"


def install_again(s: Service) -> str:
    """Upgrade with the same command. A newer checkout switches from one environment to the next."""
    s.run("sed -i 's/0\\.2\\.0/0.2.1/' /root/symphony/symphony/__init__.py")
    with s.load() as load:
        began_s = time.monotonic()
        said = s.run(INSTALL)
        took_s = time.monotonic() - began_s
        load.more(20)
    s.expect("0.2.1" in s.run("symphony --version"), "the new release does not run")
    s.expect(s.run(f"head -n 1 {CONFIG}") == TINY.partition("\n")[0], f"{CONFIG} was overwritten")
    return f"an upgrade under load took {took_s:.0f} s; {load.check()}\n{_last(said)}"


def _last(said: str) -> str:
    return "\n".join(said.splitlines()[-3:])


def rollback(s: Service) -> str:
    """Roll back to a release that can read the state.

    A rollback to a release that cannot read the state is refused, and the daemon of such a release refuses to start.
    """
    began_s = time.monotonic()
    s.run(ROLLBACK)
    took_s = time.monotonic() - began_s
    s.expect("0.2.0" in s.run("symphony --version"), "the old release does not run")
    s.stat()
    s.run("systemctl stop symphony.service")
    before = s.run(f'python3 -c "{FORMAT}; print(now)"')
    s.run(f"python3 -c \"{FORMAT}; index.execute('PRAGMA user_version=99')\"")
    refused = s.run(ROLLBACK, status=1)
    s.expect("format 99" in refused, f"no word of the format:\n{refused}")
    since_s = time.time()
    s.run("systemctl start symphony.service", status=1)
    told = s.journal_of("symphony.service", since_s)
    s.run("systemctl stop symphony.service; systemctl reset-failed symphony.service symphony.socket")
    s.run(f"python3 -c \"{FORMAT}; index.execute('PRAGMA user_version={before}')\"")
    s.run("systemctl start symphony.service")
    lines = [line for line in told.splitlines() if "format 99" in line]
    s.expect(lines, f"no word of the format:\n{told}")
    return f"0.2.1 to 0.2.0, which knows the format: {took_s:.0f} s\n{refused}\nand a daemon: {lines[0]}"


def uninstall(s: Service) -> str:
    """Remove the installation. Only the state stays."""
    began_s = time.monotonic()
    s.run(UNINSTALL)
    took_s = time.monotonic() - began_s
    s.run(f"test -e {STATE}/index.db; not mountpoint --quiet /kv; not test -e /opt/symphony")
    s.run("not systemctl cat symphony.service; not pgrep --uid symphony; not test -e /usr/local/bin/symphony")
    return f"{UNINSTALL}: {took_s:.1f} s; {s.run(f'du -sh {STATE}')} stays"


def upgrade(s: Service) -> str:
    """Upgrade release 0.1.0, while root's own daemon runs and a program works all the time.

    0.1.0 refuses the state afterwards.
    """
    s.run(f"{UNINSTALL} --purge")
    s.run("python3 -m venv /opt/symphony-0.1.0")
    pip = f"{OLD}/pip install --quiet --no-index --find-links /srv/wheelhouse --find-links /srv/previous"
    s.run(f"{pip} symphony-os==0.1.0")
    s.write("/etc/systemd/system/symphony-old.service", OLD_UNIT)
    s.run("systemctl daemon-reload && systemctl start symphony-old.service")
    s.wait_for(f"{OLD}/symphony stat >/dev/null 2>&1")
    s.run("mkdir -p /etc/symphony")
    s.write(CONFIG, TINY)
    with s.load(f"{OLD}/python") as load:
        load.more(50)
        began_s = time.monotonic()
        s.run(f"{INSTALL} --no-start")
        took_s = time.monotonic() - began_s
        s.run("systemctl stop symphony-old.service && rm /etc/systemd/system/symphony-old.service")
        s.run("systemctl daemon-reload && systemctl start symphony.service")
        load.more(50)
    checked = load.check()
    # Release 0.1.0 refuses the migrated state, and damages none of it.
    s.run("systemctl stop symphony.service")
    refused = s.run(f"{OLD}/symphony serve --model tiny --kv-memory 256M 2>&1", status=1).splitlines()[-1]
    s.expect("and this release knows formats up to 2" in refused, f"0.1.0 said {refused}")
    s.run("systemctl start symphony.service")
    name = s.run(f'grep -m 1 kv {load.log} | sed \'s/.*"name": "\\([^"]*\\)".*/\\1/\'')
    again = s.run(f"{PYTHON} /srv/programs/recompute.py {name}")
    facts = [f"0.1.0 to today's: {took_s:.0f} s beside the old daemon", f"a program of 0.1.0, all the time: {checked}"]
    return "\n".join([*facts, again, f"back to 0.1.0: {refused}"])


def older_state(s: Service) -> str:
    """Read a state of format 1 that a release of that format wrote."""
    s.run("systemctl stop symphony.service")
    s.run(f"rm -rf {STATE}")
    with tarfile.open(PLANTED) as planted:
        planted.extractall(s.machine.root / "var/lib", filter="data")
    s.run(f"mv /var/lib/state {STATE}")
    since_s = time.time()
    s.run("systemctl start symphony.service")
    told = s.journal_of("symphony.service", since_s)
    migrated = [line for line in told.splitlines() if "was of format 1" in line]
    s.expect(bool(migrated), f"no word of a migration:\n{told}")
    return f"{migrated[0]}\n{s.run('ls -lR /kv')}"


def purge(s: Service) -> str:
    s.run(f"{UNINSTALL} --purge")
    s.run(f"not test -e {STATE}; not getent passwd symphony; not getent group symphony")
    left = s.run(f"{FILES} | LC_ALL=C comm -13 {FILES_BEFORE} -")
    s.expect(not left, f"left behind:\n{left}")
    return f"{UNINSTALL} --purge leaves no file, no user, no state"
