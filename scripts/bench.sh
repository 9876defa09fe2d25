#!/usr/bin/env bash
# Builds and runs the benchmarks; arguments go to hearth-bench (--help lists them).
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
use_rust || die "no Rust 1.$RUST_MINOR_MIN or newer; run scripts/setup.sh"
cd "$ROOT"
cargo build --release --locked -p hearth -p hearth-bench
exec "$(target_dir)/release/hearth-bench" --hearth "$(target_dir)/release/hearth" "$@"
