"""`symphony fleet keys | fetch | status | place | up | join`: daemons on several machines."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import libsym
from libsym.errors import NotFound
from symphony.commands.options import Commands, add_json, add_socket, connect, on_mount
from symphony.views.fleet import fleet_lines, place_lines


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

    place = parts.add_parser("place", help="say on which machine a program should run, and why")
    add_socket(place)
    add_json(place)
    place.add_argument("files", metavar="FILE", nargs="*", help="file that the program uses")
    place.set_defaults(action=_place)

    up = parts.add_parser("up", help="run Ray on the first machine, for symphony run --fleet")
    join = parts.add_parser("join", help="run Ray on another machine of the fleet")
    join.add_argument("head", metavar="ADDRESS", help="address of the first machine, as HOST:PORT")
    for each in (up, join):
        add_socket(each)
        each.add_argument("--listen", metavar="HOST[:PORT]", required=True, help="address of this machine for Ray")
        each.set_defaults(action=_node)
    up.set_defaults(head=None)


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
    fleet = libsym.daemon_stat().get("fleet")  # a daemon of an earlier release reports no fleet
    if fleet is None:
        raise NotFound("this daemon is in no fleet: see `etcd` in symphony.toml(5)")
    print(json.dumps(fleet, indent=2) if args.json else "\n".join(fleet_lines(fleet)))
    return 0


def _place(args: argparse.Namespace) -> int:
    connect(args)
    mount = libsym.daemon_stat()["mount"]
    found = libsym.fleet_place(*(on_mount(each, mount) for each in args.files))
    print(json.dumps(found, indent=2) if args.json else "\n".join(place_lines(found)))
    return 0


def _node(args: argparse.Namespace) -> int:
    from symphony.fleet.cluster import Cluster, serve_node  # noqa: PLC0415 - only fleets need it

    connect(args)
    found = libsym.daemon_stat()
    if found.get("fleet") is None:
        raise NotFound("this daemon is in no fleet: see `etcd` in symphony.toml(5)")
    libsym.close()
    return serve_node(Cluster.of_user(), found["fleet"]["machine"], found["socket"], args.listen, args.head)
