#!/usr/bin/env bash
# Builds the release binary, target/release/hearth, without debug information. hearth.debug in the same directory has it, where
# gdb and backtraces find it.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
use_rust || die "no Rust 1.$RUST_MINOR_MIN or newer; run scripts/setup.sh"
cd "$ROOT"
build_console
cargo build --release --locked -p hearth
split_debug "$(target_dir)/release/hearth"
note "built $(target_dir)/release/hearth"
