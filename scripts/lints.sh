#!/usr/bin/env bash
# Lints of what the gate does not build: examples, benchmarks and every combination of features that a crate has.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
use_rust || die "no Rust 1.$RUST_MINOR_MIN or newer; run scripts/setup.sh"
cd "$ROOT"
cargo clippy --locked --workspace --all-targets -- -D warnings
cargo clippy --locked -p hearth-engine --features model,faults,check,paths --all-targets -- -D warnings
