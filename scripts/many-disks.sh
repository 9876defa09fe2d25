#!/usr/bin/env bash
# DISKS disks on one daemon: a verified load on some while others come and go, kill -9, and starts. Prints what
# an idle disk costs, and what adding, removing and starting take.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
export RUST_LIB_BACKTRACE=0
use_rust || die "no Rust 1.$RUST_MINOR_MIN or newer; run scripts/setup.sh"
cd "$ROOT"
cargo build --release --locked -p hearth
export HEARTH_BIN="$(target_dir)/release/hearth"
export DISKS=${DISKS:-2048}
exec cargo test --locked -p hearth-e2e --test many_disks -- --nocapture
