#!/usr/bin/env bash
# Deterministic simulation over $1 seeds, then the mutation check. A failure prints its seed.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
use_rust || die "no Rust 1.$RUST_MINOR_MIN or newer; run scripts/setup.sh"
cd "$ROOT"
cargo build --release --locked -p hearth-sim
exec "$(target_dir)/release/hearth-sim" --seeds "${1:-10000}"
