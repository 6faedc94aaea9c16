"""`symphony fleet keys | fetch | status | drain | leave | place | up | join`: daemons on several machines."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import libsym
from libsym.errors import Invalid, NotConnected, NotFound
from symphony.commands.options import Commands, add_json, add_socket, connect, on_mount
from symphony.settings.kinds import MACHINE_NAME
from symphony.views.fleet import fleet_lines, holding_text, place_lines

LOOK_S = 1.0
"""Time between two looks at what is left of a drain."""
KNOWN_S = 10.0
"""Time after which a machine knows that it is drained, or may sync no more: its lease would have ended."""


def add_fleet(commands: Commands) -> None:
    """Add the commands."""
    fleet = commands.add_parser("fleet", help="use files of daemons on other machines")
    parts = fleet.add_subparsers(required=True, metavar="WHAT")

    keys = parts.add_parser("keys", help="make the certificates by which daemons know each other")
    keys.add_argument("directory", metavar="DIR", type=Path, help="directory of the fleet's authority")
    keys.add_argument(
        "names",
        metavar="NAME",
        nargs="+",
        help="name of a daemon, which gets a directory below DIR; NAME=HOST for etcd",
    )
    keys.set_defaults(action=_keys)

    fetch = parts.add_parser("fetch", help="copy a file of another daemon")
    add_socket(fetch)
    fetch.add_argument("peer", metavar="PEER", help="name of the other daemon")
    fetch.add_argument("path", metavar="FILE", help="file on the mount of the other daemon")
    fetch.add_argument("new", metavar="NEW", nargs="?", help="name of the copy (default: the name of FILE)")
    fetch.set_defaults(action=_fetch)

    status = parts.add_parser("status", help="list the machines of the fleet")
    add_socket(status)
    add_json(status)
    status.set_defaults(action=_status)

    drain = parts.add_parser("drain", help="give a machine no more programs and copies, and wait until it can go")
    leave = parts.add_parser("leave", help="take a machine out of the fleet after its drain")
    for each, action in ((drain, _drain), (leave, _leave)):
        add_socket(each)
        each.add_argument("machine", metavar="MACHINE", nargs="?", type=_machine, help="default: this machine")
        each.set_defaults(action=action)
    drain.add_argument("--cancel", action="store_true", help="end the drain: the machine stays")
    leave.add_argument("--force", action="store_true", help="lose what no other machine has")

    place = parts.add_parser("place", help="say on which machine a program should run, and why")
    add_socket(place)
    add_json(place)
    place.add_argument("files", metavar="FILE", nargs="*", help="file that the program uses")
    place.set_defaults(action=_place)

    up = parts.add_parser("up", help="run Ray on the first machine, for symphony run --fleet")
    join = parts.add_parser("join", help="run Ray on another machine of the fleet")
    join.add_argument("head", metavar="ADDRESS", help="address of the first machine, as HOST:PORT")
    way = join.add_mutually_exclusive_group(required=True)
    way.add_argument(
        "--running", action="store_true", help="start no Ray: the one that runs here is in a cluster there"
    )
    up.add_argument("--listen", metavar="HOST[:PORT]", required=True, help="address of this machine for Ray")
    way.add_argument("--listen", metavar="HOST", help="address of this machine for Ray")
    for each in (up, join):
        add_socket(each)
        each.set_defaults(action=_node)
    up.set_defaults(head=None, running=False)


def _machine(text: str) -> str:
    if not MACHINE_NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no name of a machine")
    return text


def _keys(args: argparse.Namespace) -> int:
    from symphony.fleet.keys import make_keys  # noqa: PLC0415 - a package that few installations have

    make_keys(args.directory, args.names)
    return 0


def _fetch(args: argparse.Namespace) -> int:
    connect(args)
    libsym.kv_fetch(args.peer, args.path, Path(args.path).name if args.new is None else args.new).close()
    return 0


def _status(args: argparse.Namespace) -> int:
    connect(args)
    fleet = {**libsym.fleet_machines(), "ray": _ray()}
    print(json.dumps(fleet, indent=2) if args.json else "\n".join(fleet_lines(fleet)))
    return 0


def _ray() -> dict[str, Any] | None:
    """Return the address of this user's Ray cluster, and its trouble. None: this machine is in none."""
    from symphony.fleet.cluster import Cluster  # noqa: PLC0415 - only fleets need it

    cluster = Cluster.of_user()
    where, trouble = cluster.first_machine(), ""
    if where is None:
        return None
    try:
        cluster.probe(where)
    except NotConnected as error:
        trouble = str(error)
    return {"address": where, "trouble": trouble}


def _drain(args: argparse.Namespace) -> int:
    connect(args)
    fleet, shown = libsym.fleet_machines("return" if args.cancel else "drain", args.machine or ""), ""
    machine = args.machine or fleet["machine"]
    is_elsewhere = machine != fleet["machine"] and machine in fleet["machines"]
    known_s = time.monotonic() + (KNOWN_S if is_elsewhere else 0)
    while machine in fleet["drained"]:
        held, trouble = fleet["holdings"].get(machine), fleet["names_trouble"]
        text = holding_text(fleet, machine)
        if trouble:
            text = f"nobody knows what {machine} has: {trouble}"
        is_over = held is None and not trouble
        if text != shown and (not is_over or time.monotonic() >= known_s):
            print(text, flush=True)
            shown = text
            if is_over:
                return 0
        time.sleep(LOOK_S)
        try:
            fleet = libsym.fleet_machines()
        except NotConnected as error:
            raise NotConnected(f"the drain of {machine} goes on, but {error}") from None
    if not args.cancel:
        raise Invalid(f"somebody has ended the drain of {machine}")
    print(f"{machine} stays")
    return 0


def _leave(args: argparse.Namespace) -> int:
    connect(args)
    fleet = libsym.fleet_machines("lose" if args.force else "leave", args.machine or "")
    machine = args.machine or fleet["machine"]
    if held := fleet["holdings"].get(machine):
        for path in held["paths"]:
            print(f"lost: {path}")
        if (num_more := held["alone"] + held["writing"] - len(held["paths"])) > 0:
            print(f"lost: {num_more} more")
    print(f"{machine} has left the fleet {fleet['name']}")
    return 0


def _place(args: argparse.Namespace) -> int:
    connect(args)
    mount = libsym.daemon_stat()["mount"]
    found = libsym.fleet_place(*(on_mount(each, mount) for each in args.files))
    print(json.dumps(found, indent=2) if args.json else "\n".join(place_lines(found)))
    return 0


def _node(args: argparse.Namespace) -> int:
    from symphony.fleet.cluster import Cluster, serve_node, serve_runner  # noqa: PLC0415 - only fleets need it

    connect(args)
    found = libsym.daemon_stat()
    if found.get("fleet") is None:
        raise NotFound("this daemon is in no fleet: see `etcd` in symphony.toml(5)")
    libsym.close()
    machine, directory = found["fleet"]["machine"], Cluster.of_user().directory
    if args.running:
        theirs = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
        return serve_runner(Cluster(directory, theirs), machine, found["socket"], args.head)
    return serve_node(Cluster(directory), machine, found["socket"], args.listen, args.head)
