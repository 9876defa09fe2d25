#!/usr/bin/env bash
# Each I/O of fixed workloads fails alone; then deterministic simulation over $1 seeds. A failure prints how to have it again.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
use_rust || die "no Rust 1.$RUST_MINOR_MIN or newer; run scripts/setup.sh"
cd "$ROOT"
cargo build --release --locked -p hearth-sim
"$(target_dir)/release/hearth-sim" --single
exec "$(target_dir)/release/hearth-sim" --seeds "${1:-10000}"
