#!/usr/bin/env bash
# Runs every fuzz target for $1 minutes. Stable Rust: no sanitizer, but value profiles, without
# which checks of several bytes are hardly ever passed.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
use_rust || die "no Rust 1.$RUST_MINOR_MIN or newer; run scripts/setup.sh"
minutes=${1:-10}
[[ $minutes =~ ^[1-9][0-9]*$ ]] || die "minutes: a whole number, at least 1"
cd "$ROOT/fuzz"
host=$(rustc -vV | sed -n 's/^host: //p')

say "Building the fuzz targets"
# What libFuzzer needs from the compiler. With --target, build scripts and macros stay without.
RUSTFLAGS="--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1" \
    cargo build --release --locked --bins --target "$host"

failed=()
for target in $(awk -F'"' '/^\[\[bin\]\]/ { bin = 1 } bin && /^name/ { print $2; bin = 0 }' Cargo.toml); do
    say "$target, $minutes min"
    mkdir -p "corpus/$target" "artifacts/$target"
    "${CARGO_TARGET_DIR:-target}/$host/release/$target" -max_total_time=$((minutes * 60)) -use_value_profile=1 \
        -timeout=10 -rss_limit_mb=2048 -artifact_prefix="artifacts/$target/" -print_final_stats=1 \
        "corpus/$target" || failed+=("$target")
done
((${#failed[@]} == 0)) || die "failed: ${failed[*]} (inputs in fuzz/artifacts)"
say "all fuzz targets clean"
