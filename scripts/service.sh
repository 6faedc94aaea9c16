# Shared by scripts/install and scripts/uninstall: the places of the service. Sourced after lib.sh.
#
#   PREFIX/VERSION/    a virtual environment; its `stamp` is a digest of its sources, and is written last
#   PREFIX/current     link to the version that runs; PREFIX/previous: link to the version before
#   PREFIX/files.list  the installed files elsewhere: units, manual pages, completions, the command
# shellcheck shell=bash

prefix=/opt/symphony
root= # for a test: everything lies below it, and packages, users and units of this machine stay untouched
etc=/etc/symphony
state=/var/lib/symphony # of symphony@NAME: $state-NAME
cache=/var/cache/symphony # of all instances

check_places() {
    local place
    for place in "$prefix" "${root:-/}"; do
        case $place in
        *[!A-Za-z0-9/._+-]*) fail "$place: a prefix and a root have letters, digits and /._+- alone" ;;
        /*) ;;
        *) fail "$place is no absolute path" ;;
        esac
    done
    root=$(realpath -sm "${root:-/}") root=${root%/}
    prefix=$(realpath -sm "$prefix") prefix=${prefix%/}
    [ -n "$prefix" ] || fail "Symphony takes a directory of its own: --prefix /opt/symphony, for one"
    [ -n "$root" ] || [ "$(id -u)" = 0 ] || fail "this installs a service of the machine: start it as root" \
        "(scripts/run needs no root: it has its environment in this checkout)"
}

# Units that the first installation enables.
enabled_units=(symphony-mount.socket symphony.socket symphony.service)

# Prints the prefix of the installed command; nothing if no command is installed.
installed_at() {
    local there=$root/usr/local/bin/symphony target
    target=$(readlink "$there") || return 0
    case $target in */current/bin/symphony)
        target=$(realpath -sm "${there%/*}/$target")
        target=${target#"$root"}
        echo "${target%/current/bin/symphony}"
        ;;
    esac
}

# Fails if Symphony is installed under another prefix. Units, state and configuration allow one installation a machine.
require_no_other() {
    local other
    other=$(installed_at)
    [ -z "$other" ] || [ "$other" = "$prefix" ] || fail "Symphony is installed in $other, not in $prefix: say" \
        "--prefix $other, or take that away first: scripts/uninstall --prefix $other"
}

# Allows one installation or removal at a time. Every user who can open the file can hold its lock, so only root may
# open it.
lock_prefix() {
    local lock=$root$prefix/.lock
    (umask 077 && : >>"$lock")
    chmod 600 "$lock" # up to release 0.2 all users could read it
    exec 8>"$lock"
    flock -n 8 || fail "another scripts/install or scripts/uninstall is at work on $prefix: wait for it"
}

systemd_runs() { [ -z "$root" ] && [ -d /run/systemd/system ]; }

# Prints the installed units, as systemctl names them.
our_units() { [ ! -f "$root$prefix/files.list" ] || grep -o 'lib/systemd/system/.*' "$root$prefix/files.list" | cut -d / -f 4; }

# Prints the version that a link names; nothing without the link.
version_at() { [ ! -L "$root$prefix/$1" ] || readlink "$root$prefix/$1"; }

# is_staged PATH: whether the file at PATH equals that of an installed version, no matter who put the file there.
is_staged() {
    local there=$root$1 staged
    for staged in "$root$prefix"/*/files"$1"; do
        if [ -L "$staged" ]; then
            [ "$(readlink "$staged")" != "$(readlink "$there")" ] || return 0
        elif [ ! -L "$there" ] && cmp -s "$staged" "$there"; then
            return 0
        fi
    done
    return 1
}

# remove_files LIST: removes the listed files that are ours, and directories below /usr/local that become empty.
remove_files() {
    local path
    while read -r path; do
        rm -f "$root$path.installing"
        ! is_ours "$path" || rm -f "$root$path"
        (cd "$root/usr/local" && rmdir -p --ignore-fail-on-non-empty "$(dirname "${path#/usr/local/}")" 2>/dev/null) || true
    done <"$1"
}

# is_ours PATH: whether scripts/install has put PATH there. An interrupted installation has not written its list yet.
is_ours() { grep -qsxF "$1" "$root$prefix/files.list" || is_staged "$1"; }
