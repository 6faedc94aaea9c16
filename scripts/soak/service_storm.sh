#!/bin/bash
# Does to the mount what users do in a shell, and stops at the first failure: service_storm.sh MOUNT DIRECTORY SCRATCH
set -euo pipefail
mount=$1 directory=$2 scratch=$3
cd "$mount/$directory"
for turn in 1 2 3; do
    cp base.kv copy.kv
    cp -a copy.kv kept.kv
    mv kept.kv moved.kv
    tar cf "$scratch/all.tar" -- *.kv
    mkdir out
    tar xf "$scratch/all.tar" -C out
    cmp base.kv out/base.kv
    ls -lR . >/dev/null
    find . -name '*.kv' -size +0 -print | xargs stat -c %s >/dev/null
    grep -rc a "$mount/.symphony/text/$directory" >/dev/null || test $? = 1
    getfattr -d -m - -- base.kv moved.kv >/dev/null
    cat "$mount/.symphony/metrics" >/dev/null
    head -c 100000 /dev/zero >plain
    truncate -s 5000 plain
    echo "$turn" >>plain
    sync plain
    test "$(stat -c %s plain)" = 5002
    printf 'the text of turn %s' "$turn" >"$mount/.symphony/text/$directory/text.kv"
    rm -r out copy.kv moved.kv plain text.kv
done
