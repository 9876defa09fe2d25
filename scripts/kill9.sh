#!/usr/bin/env bash
# kill -9 of the real daemon under a verified write load, CYCLES times, in every cache mode, and while
# disks are added and removed, at least 1000 times.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
export RUST_LIB_BACKTRACE=0
use_rust || die "no Rust 1.$RUST_MINOR_MIN or newer; run scripts/setup.sh"
cd "$ROOT"
cargo build --release --locked -p hearth
export HEARTH_BIN="$(target_dir)/release/hearth"
export CYCLES=${CYCLES:-300}
export CHANGES=${CHANGES:-1000}
exec cargo test --locked -p hearth-e2e --test kill9 --test registry -- --nocapture --test-threads=1
