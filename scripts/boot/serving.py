"""Scenarios of the service: it starts, serves all users, and stays up."""

from __future__ import annotations

import time

from running import TINY, Service


def ready(s: Service) -> str:
    """Restart the service. When systemd reports the service as started, the mount and the socket answer."""
    began_s = time.monotonic()
    s.run("systemctl restart symphony.service; mountpoint --quiet /kv; symphony stat --json >/dev/null")
    took_s = time.monotonic() - began_s
    s.expect(s.show("symphony.service", "Type") == "notify", "symphony.service is not Type=notify")
    status = s.show("symphony.service", "StatusText")
    return f"restarted, mounted and answering in {took_s:.1f} s; status: {status}"


def seen(s: Service) -> str:
    """Look at the mount as several users.

    All users see the mount, although the daemon has its own namespace and no privileges.
    """
    s.run("install --directory --owner=alice --mode=0755 /kv/alice")
    s.run("echo hers >/kv/alice/own && chmod 600 /kv/alice/own && echo all >/kv/alice/all", user="alice")
    s.run('test "$(cat /kv/alice/all)" = all && not cat /kv/alice/own && not touch /kv/alice/mine', user="bob")
    status = s.run(f"grep -E '^(Uid|CapPrm|CapEff|CapBnd|NoNewPrivs|Seccomp):' /proc/{s.pid()}/status")
    facts = dict(line.split(":\t", 1) for line in status.splitlines())
    s.expect(int(facts["CapPrm"], 16) == int(facts["CapEff"], 16) == 0, f"the daemon has capabilities: {facts}")
    s.expect(facts["Uid"].split()[0] == s.run("id -u symphony"), f"the daemon runs as {facts['Uid']}")
    own, outside = s.run(f"readlink /proc/{s.pid()}/ns/mnt"), s.run("readlink /proc/1/ns/mnt")
    s.expect(own != outside, "the daemon has no mount namespace of its own")
    return s.run("findmnt --noheadings /kv") + "\n" + status.replace("\n", ", ").replace("\t", " ")


def program(s: Service) -> str:
    """Run an ordinary user's program in the sandbox."""
    s.run("cp /srv/programs/hello.py /home/alice/hello.py", user="alice")
    return s.run("symphony run hello.py", user="alice")


def killed(s: Service) -> str:
    """Kill the daemon by SIGKILL. systemd starts it again, and every synced file exists."""
    kills = 1 if s.is_short else 3
    with s.load() as one, s.load(user="bob") as other:
        before = int(s.show("symphony.service", "NRestarts"))
        for _ in range(kills):
            one.more(30)
            s.run("systemctl kill --signal=KILL --kill-whom=main symphony.service")
            one.more(5)
            other.more(5)
        restarts = int(s.show("symphony.service", "NRestarts")) - before
    s.expect(restarts == kills, f"{restarts} restarts")
    return f"{kills} kills, {restarts} restarts; {one.check()}; {other.check()}"


def watchdog(s: Service) -> str:
    """Stop a daemon so that it hangs. The watchdog ends it and starts another."""
    s.drop_in("[Service]\nWatchdogSec=4\nTimeoutAbortSec=2\n")
    s.run("systemctl restart symphony.service")
    stuck = s.pid()
    began_s, since_s = time.monotonic(), time.time()
    s.run(f"kill -STOP {stuck}")
    s.wait_for(
        f'[ "$(systemctl show --value --property=MainPID symphony.service)" != {stuck} ]'
        " && systemctl is-active --quiet symphony.service && symphony stat --json >/dev/null 2>&1"
    )
    took_s = time.monotonic() - began_s
    told = s.journal_of("symphony.service", since_s)
    words = [line for line in told.splitlines() if "watchdog" in line.lower()]
    s.expect(words, f"no word of a watchdog:\n{told}")
    s.drop_in("")
    s.run("systemctl restart symphony.service")
    return f"stopped in its tracks, replaced after {took_s:.1f} s (WatchdogSec=4)\n{words[0]}"


def reload(s: Service) -> str:
    """Reload. A changed quota holds at once; a file with an error changes nothing, and the error names its line."""
    pid = s.pid()
    s.run("install --directory --owner=bob /kv/bob")
    write = "bash -c 'head --bytes=3M /dev/zero >/kv/bob/zeros' 2>&1"  # the file's name or its bytes may be refused
    s.run(write, user="bob")
    s.configure(TINY + 'quota = "1M"\n')
    s.run("systemctl reload symphony.service")
    refused = s.run(f"rm /kv/bob/zeros; not {write}", user="bob")
    s.expect("quota" in refused.lower(), f"no quota: {refused}")
    s.configure(TINY + '\nquota = "1X"\n')
    since_s = time.time()
    s.run("systemctl reload symphony.service", status=1)
    told = s.journal_of("symphony.service", since_s)
    lines = [line for line in told.splitlines() if "quota" in line]
    s.expect(bool(lines), f"nobody names the key:\n{told}")
    s.run(f"not {write}; rm -f /kv/bob/zeros", user="bob")
    s.configure(TINY)
    s.run("systemctl reload symphony.service")
    s.run(f"{write} && rm /kv/bob/zeros", user="bob")
    s.expect(s.pid() == pid, "it was restarted")
    return f"{refused}\n{lines[0]}"


def stopped(s: Service) -> str:
    """Stop the service under load. The service ends in time and leaves nothing behind. Writes without a sync are kept,
    too.
    """
    with s.load() as one, s.load(user="bob") as other:
        one.more(20)
        s.run("install --directory --owner=alice /kv/last && echo last >/kv/last/words")
        began_s = time.monotonic()
        s.run("systemctl stop symphony.service")
        took_s = time.monotonic() - began_s
        result = s.show("symphony.service", "Result")
        s.expect(result == "success", f"it ended with {result}")
        s.run("not mountpoint --quiet /kv; not test -e /run/symphony/symphony.sock; not pgrep --uid symphony")
        s.run("systemctl start symphony.service")
        one.more(20)
        other.more(20)
    s.run('test "$(cat /kv/last/words)" = last')
    return f"stopped under load in {took_s:.1f} s; {one.check()}; {other.check()}"


def activated(s: Service) -> str:
    """Connect to the socket of a stopped daemon. The first connection starts it."""
    s.run("systemctl stop symphony.service && systemctl start symphony.socket")
    s.expect(s.pid() == 0, "it has not stopped")
    began_s = time.monotonic()
    found = s.stat(user="alice")
    s.expect(found["pid"] > 0, "nobody answers")
    return f"alice's connection started it: an answer after {time.monotonic() - began_s:.1f} s"


def second_daemon(s: Service) -> str:
    """Start a second daemon on the same state. The second daemon must refuse to start."""
    serve = "symphony serve --model tiny --state /var/lib/symphony --mount /tmp/kv2 --socket /tmp/s2"
    said = s.run(f"runuser -u symphony -- /opt/symphony/current/bin/{serve}", status=1)
    s.expect("another daemon uses the state directory" in said, said)
    return said.splitlines()[-1]


def stale_mount(s: Service) -> str:
    """Kill the mount helper with the daemon, so that a stale mount is left. The next start clears it."""
    s.drop_in("[Service]\nRestart=no\n")
    s.run("systemctl restart symphony.service")
    s.run("systemctl kill --signal=STOP symphony.service")  # else the daemon would use a new helper, which unmounts
    s.run("systemctl kill --signal=KILL symphony-mount.service; systemctl kill --signal=KILL symphony.service")
    s.wait_for("not systemctl is-active --quiet symphony.service")
    stale = s.run("not stat /kv 2>&1")
    s.expect("not connected" in stale, f"the mount is not stale: {stale}")
    s.drop_in("")
    s.run("systemctl reset-failed; systemctl start symphony.service; ls /kv >/dev/null")
    return f"{stale}: the next start has cleared it"


def full_disk(s: Service) -> str:
    """Fill the disk. Calls fail, but the daemon runs on. When space is free again, calls succeed, and synced files
    exist.
    """
    s.run("systemctl stop symphony.service")
    s.run("mount -t tmpfs -o size=64M,mode=0700,uid=symphony,gid=symphony state /var/lib/symphony")
    try:
        s.run("systemctl start symphony.service")
        pid = s.pid()
        with s.load() as load:
            load.more(5)
            s.run("install --directory --owner=bob /kv/bob")
            full = s.run("not head --bytes=100M /dev/zero 2>&1 >/kv/bob/zeros", user="bob")
            s.expect("No space left" in full, f"no word of the disk: {full}")
            s.expect(s.stat()["pid"] == pid, "the daemon is another one")
            s.run("rm /kv/bob/zeros", user="bob")
            load.more(20)
        s.expect(s.pid() == pid, "the daemon is another one")
        checked = load.check()
        s.run("systemctl restart symphony.service")
        again = load.check()
    finally:  # later scenarios need the earlier state
        s.run("systemctl stop symphony.service && umount /var/lib/symphony")
        s.run("systemctl start symphony.service")
    return f"{full}\n{checked}; after a restart: {again}"
