#!/usr/bin/env bash
# Pools of earlier builds in this one: stopped, killed, overwritten until the log had gone round, and given up. And
# the other way round: a pool that this build has opened is refused by them, in words, and stays as it is.
#
#   scripts/old-builds.sh [COMMIT…]    default: two from before the engine was taken apart
#
# Each is built in a directory of its own below the target directory, which stays for the next time.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
export RUST_LIB_BACKTRACE=0
use_rust || die "no Rust 1.$RUST_MINOR_MIN or newer; run scripts/setup.sh"
cd "$ROOT"
(($#)) || set -- 36e38b3 e3b4d5a
cargo build --locked -p hearth
HEARTH_BIN="$(target_dir)/debug/hearth"
export HEARTH_BIN
for commit in "$@"; do
    commit=$(git rev-parse --short=12 "$commit^{commit}") || die "this clone has no commit $commit"
    old="$(target_dir)/old/$commit"
    if [[ ! -x $old/debug/hearth ]]; then
        mkdir -p "$old/source"
        git archive "$commit" | tar -x -C "$old/source"
        (cd "$old/source" && cargo build --locked -p hearth --target-dir "$old")
    fi
    say "Pools of $commit and of this build"
    HEARTH_OLD_BIN="$old/debug/hearth" e2e_tests --only old_builds
done
