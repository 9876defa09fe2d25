#!/usr/bin/env bash
# Builds the release binary and says where it is.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
use_rust || die "no Rust 1.$RUST_MINOR_MIN or newer; run scripts/setup.sh"
cd "$ROOT"
build_console
cargo build --release --locked -p hearth
note "built $(target_dir)/release/hearth"
