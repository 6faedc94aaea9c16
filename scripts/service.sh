# Shared by scripts/install and scripts/uninstall: where the service has its things. Sourced after lib.sh.
#
#   PREFIX/VERSION/    a virtual environment; `stamp` in it says of what it was made, and is written last
#   PREFIX/current     the version that runs; PREFIX/previous the one before
#   PREFIX/files.list  what lies elsewhere for it: units, manual pages, completions, the command
# shellcheck shell=bash

prefix=/opt/symphony
root= # where all of it lies below, for a test: then no package, user or unit of this machine is touched
etc=/etc/symphony
state=/var/lib/symphony # of symphony@NAME: $state-NAME

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

# Those that are enabled by the first installation.
enabled_units=(symphony-mount.socket symphony.socket symphony.service)

# The prefix that the command is of; nothing if there is none.
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

# A machine has one: units, the state and the configuration are in the same places for all.
require_no_other() {
    local other
    other=$(installed_at)
    [ -z "$other" ] || [ "$other" = "$prefix" ] || fail "Symphony is installed in $other, not in $prefix: say" \
        "--prefix $other, or take that away first: scripts/uninstall --prefix $other"
}

# One installation or removal at a time. Whoever can open the file can hold its lock: so that is root alone.
lock_prefix() {
    local lock=$root$prefix/.lock
    (umask 077 && : >>"$lock")
    chmod 600 "$lock" # up to 0.2 all could read it
    exec 8>"$lock"
    flock -n 8 || fail "another scripts/install or scripts/uninstall is at work on $prefix: wait for it"
}

systemd_runs() { [ -z "$root" ] && [ -d /run/systemd/system ]; }

# Those that scripts/install has put there, as systemctl names them.
our_units() { [ ! -f "$root$prefix/files.list" ] || grep -o 'lib/systemd/system/.*' "$root$prefix/files.list" | cut -d / -f 4; }

# The version that a link names; nothing if there is none.
version_at() { [ ! -L "$root$prefix/$1" ] || readlink "$root$prefix/$1"; }

# Whether what lies at PATH is as a version here has it, put there or not.
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

# remove_files LIST: what is in it and is ours, and the directories that it leaves empty below /usr/local.
remove_files() {
    local path
    while read -r path; do
        rm -f "$root$path.installing"
        ! is_ours "$path" || rm -f "$root$path"
        (cd "$root/usr/local" && rmdir -p --ignore-fail-on-non-empty "$(dirname "${path#/usr/local/}")" 2>/dev/null) || true
    done <"$1"
}

# Whether scripts/install has put PATH there; its list comes last.
is_ours() { grep -qsxF "$1" "$root$prefix/files.list" || is_staged "$1"; }
