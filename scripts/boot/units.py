"""Scenarios of other units: a user's own daemon, a daemon for another model, a program, the gateway."""

from __future__ import annotations

import json
import time

from running import TINY, Service


def user_unit(s: Service) -> str:
    """Run a daemon as an ordinary user, on a mount in her home that she alone can enter."""
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
    """Run a second daemon beside the first, with its own state, socket and mount."""
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
    """Run a program as a service. The program starts again after a kill, and after a restart of its daemon."""
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


GATEWAY = "symphony-gateway.service"
KEY = "/var/lib/symphony-gateway/gateway.key"


def gateway(s: Service) -> str:
    """Talk to the gateway. Each request needs the key. A conversation outlives a kill of the gateway. A synced
    conversation also outlives a kill of the daemon.
    """
    began_s = time.monotonic()
    s.run(f"systemctl start {GATEWAY}")
    s.wait_for(f"test -s {KEY}")
    s.run(f"not cat {KEY}", user="alice")
    key = s.run(f"cat {KEY}")
    said = [_turn(s, key)]
    took_s = time.monotonic() - began_s
    refused = s.run("python3 /srv/programs/talk.py none first", user="alice", status=1)
    s.expect(refused.startswith("403 "), f"without the key: {refused}")
    for unit in (GATEWAY, "symphony.service"):
        s.run("sync /kv/gateway-$(id -u symphony-run)/local/sessions/first.kv")
        before = s.show(unit, "MainPID")
        s.run(f"systemctl kill --signal=KILL --kill-whom=main {unit}")
        s.wait_for(f'[ "$(systemctl show --value --property=MainPID {unit})" != {before} ]')
        said.append(_turn(s, key))
    s.expect(said[2][: len(said[1])] == said[1] and said[1][: len(said[0])] == said[0], f"other words: {said}")
    s.expect([len(each) for each in said] == [2, 4, 6], f"these are not the turns that were said: {said}")
    own = s.run("stat --format='%U %a' /kv/gateway-$(id -u symphony-run)")
    s.expect(own == "symphony-run 700", f"the gateway's directory is {own}")
    s.run(f"systemctl stop {GATEWAY}")
    result = s.show(GATEWAY, "Result")
    s.expect(result == "success", f"it ended with {result}")
    exposed = s.run(f"systemd-analyze security --no-pager {GATEWAY} | tail -n 1")
    turns = f"answered in {took_s:.1f} s; both killed, and {len(said[2]) // 2} turns are there"
    return f"{turns}\nwithout the key: {refused[:3]}\n{exposed}"


def _turn(s: Service, key: str) -> list[dict[str, str]]:
    """Add a turn to the conversation. Return all its messages."""
    s.wait_for(f"python3 /srv/programs/talk.py {key} first >/home/alice/told 2>&1", user="alice")
    said: list[dict[str, str]] = json.loads(s.run("cat /home/alice/told"))["messages"]
    return said
