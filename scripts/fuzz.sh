#!/usr/bin/env bash
# Runs every fuzz target for $1 minutes. Stable Rust: no sanitizer, value profiles instead.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
use_rust || die "no Rust 1.$RUST_MINOR_MIN or newer; run scripts/setup.sh"
minutes=${1:-10}
cd "$ROOT/fuzz"
failed=()
for target in $(sed -n 's/^name = "\(fuzz_.*\)"/\1/p' Cargo.toml); do
    say "$target, $minutes min"
    # What libFuzzer needs from the compiler; a nightly toolchain would add sanitizers.
    RUSTFLAGS="--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares -Cdebug-assertions -Ccodegen-units=1" \
        cargo build --release --target "$(rustc -vV | sed -n 's/^host: //p')" --bin "$target"
    mkdir -p "corpus/$target" "artifacts/$target"
    binary="${CARGO_TARGET_DIR:-target}/$(rustc -vV | sed -n 's/^host: //p')/release/$target"
    "$binary" -max_total_time=$((minutes * 60)) -use_value_profile=1 -timeout=10 -rss_limit_mb=2048 \
        -artifact_prefix="artifacts/$target/" -print_final_stats=1 "corpus/$target" || failed+=("$target")
done
((${#failed[@]} == 0)) || die "failed: ${failed[*]} (inputs in fuzz/artifacts)"
say "all fuzz targets clean"
