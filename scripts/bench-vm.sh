#!/usr/bin/env bash
# Builds and runs `hearth bench` with its defaults, results in bench/results/vm; arguments go to it.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
use_rust || die "no Rust 1.$RUST_MINOR_MIN or newer; run scripts/setup.sh"
cd "$ROOT"
cargo build --release --locked -p hearth
mkdir -p .bench
exec "$(target_dir)/release/hearth" bench --flash .bench --out bench/results/vm "$@"
