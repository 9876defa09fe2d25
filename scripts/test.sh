#!/usr/bin/env bash
# Everything that must pass: format, links between the documents, lints, unit and property tests, simulation and mutation
# check, end-to-end tests with real clients, kill -9 cycles, a short benchmark run (which only
# has to finish: tests never assert times).
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
export RUST_LIB_BACKTRACE=0
use_rust || die "no Rust 1.$RUST_MINOR_MIN or newer; run scripts/setup.sh"
cd "$ROOT"
started=$SECONDS

step() { say "$* ($((SECONDS - started)) s)"; }

step "Format"
# Left behind by a merge, they break files no compiler reads.
if git grep -nE '^(<{7}|>{7}) ' -- .; then die "conflict markers, see above"; fi
if cargo fmt --version >/dev/null 2>&1; then cargo fmt --all --check; else note "skipped: no rustfmt"; fi

step "Documents"
if command -v python3 >/dev/null; then scripts/docs-check.py; else note "skipped: no python3"; fi

step "Lints"
if cargo clippy --version >/dev/null 2>&1; then
    cargo clippy --locked --workspace --all-targets -- -D warnings
else
    note "skipped: no clippy"
fi
# The fuzz targets are a workspace of their own, which nothing here builds.
(cd fuzz && cargo metadata --locked --format-version 1 >/dev/null) ||
    die "fuzz/Cargo.lock is not current; run cargo metadata in fuzz/ without --locked"

step "Unit and property tests"
cargo test --locked --workspace --exclude hearth-e2e

# With the checks a release leaves out, and as fast: what takes the time is the same code.
step "Simulation"
cargo build --locked -p hearth-sim -p hearth-bench
"$(target_dir)/debug/hearth-sim" --seeds "${SEEDS:-10000}"

step "Mutation check"
cargo test --locked -p hearth-sim --features mutations --test mutations

# Real clients meet what users run.
step "Release build"
cargo build --release --locked -p hearth
export HEARTH_BIN="$(target_dir)/release/hearth"

step "End to end with real clients"
CYCLES=${CYCLES:-5} cargo test --locked -p hearth-e2e -- --nocapture --test-threads=1

step "Benchmark smoke run"
"$(target_dir)/debug/hearth-bench" --hearth "$HEARTH_BIN" --smoke

say "all passed in $((SECONDS - started)) s"
