#!/usr/bin/env bash
# Measures docs/crash-table.md (or the file CRASH_TABLE names) anew, with a release build and a guest in QEMU.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
use_rust || die "no Rust 1.$RUST_MINOR_MIN or newer; run scripts/setup.sh"
cd "$ROOT"
file=$(realpath -m -- "${CRASH_TABLE:-docs/crash-table.md}")
if [[ -z ${HEARTH_BIN:-} ]]; then
    cargo build --release --locked -p hearth
    export HEARTH_BIN="$(target_dir)/release/hearth"
fi
export CRASH_TABLE="$file" RUST_LIB_BACKTRACE=0
e2e_tests --only crash_table
