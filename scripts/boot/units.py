"""What else can be a unit: a daemon of one's own, one for another model, a program."""

from __future__ import annotations

import time

from service import TINY, Service


def user_unit(s: Service) -> str:
    """Without root: alice's own daemon, on a mount in her home that is hers alone."""
    s.run("loginctl enable-linger alice")
    s.run("mkdir -p ~/.config/symphony", user="alice")
    s.write("/home/alice/.config/symphony/symphony.toml", TINY)
    began_s = time.monotonic()
    s.run("systemctl --user enable --now symphony.service", user="alice")
    took_s = time.monotonic() - began_s
    found = s.stat(user="alice")
    s.expect(found["mount"] == "/home/alice/kv", f"the mount is {found['mount']}")
    s.run('echo hers >~/kv/own && test "$(cat ~/kv/own)" = hers && test -O ~/kv/own', user="alice")
    s.run("not ls /home/alice/kv", user="bob")
    s.expect(s.stat()["mount"] == "/kv", "the machine's daemon is another one")
    s.run("systemctl --user restart symphony.service && cat ~/kv/own", user="alice")
    s.run("systemctl --user disable --now symphony.service && not mountpoint --quiet ~/kv", user="alice")
    s.run("loginctl disable-linger alice")
    return f"started in {took_s:.1f} s, pid {found['pid']}, {found['mount']}, {found['socket']}"


def instance(s: Service) -> str:
    """One more daemon beside the first, with a state, a socket and a mount of its own."""
    s.write("/etc/symphony/two.toml", TINY)
    s.run("systemctl start symphony@two.service")
    told = s.run('SYMPHONY_SOCKET=/run/symphony/two.sock symphony stat --json | grep -o \'"mount": "[^"]*"\'')
    s.expect("/kv-two" in told, f"the mount of the second: {told}")
    s.run("echo two >/kv-two/which && not test -e /kv/which")
    s.run("systemctl stop symphony@two.service && not mountpoint --quiet /kv-two && mountpoint --quiet /kv")
    s.run('systemctl start symphony@two.service && test "$(cat /kv-two/which)" = two')
    s.run("systemctl stop symphony@two.service && rm -rf /etc/symphony/two.toml /var/lib/symphony-two && rmdir /kv-two")
    return "symphony@two has /kv-two beside /kv"


def program_unit(s: Service) -> str:
    """A program as a service: it begins anew when it is killed, and when its daemon was restarted."""
    s.write("/etc/symphony/programs/beat.env", "PROGRAM=/srv/programs/beat.py\n")
    since_s = time.time()
    unit = "symphony-run@beat.service"
    beats = f"journalctl --quiet --output=cat --since=@{since_s:.3f} --unit={unit} | grep -c '^beat '"
    s.run(f"systemctl start {unit}")
    s.wait_for(f'[ "$({beats} || true)" -ge 3 ]')
    ps = s.run("symphony ps").splitlines()
    s.run(f"systemctl kill --signal=KILL {unit}")
    s.wait_for(f'[ "$({beats} || true)" -ge 6 ]')
    s.run("systemctl restart symphony.service")
    s.wait_for(f'[ "$({beats} || true)" -ge 9 ]')
    restarts = s.show(unit, "NRestarts")
    s.run(f"systemctl stop {unit} && rm /etc/symphony/programs/beat.env")
    s.run("not pgrep --full /srv/programs/[b]eat.py")
    return "\n".join([*ps, f"killed once, its daemon restarted once: {restarts} restarts"])
