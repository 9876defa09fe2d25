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

# What each part may take, in seconds, on two cores with everything but the tests built before: twice what it
# takes there, or so. A part that takes longer is marked at the end and fails nothing, for machines differ; what
# does not fit belongs into scripts/lab.sh.
declare -A MAY_TAKE=(
    ["Format"]=10
    ["Documents"]=10
    ["Lints"]=120
    ["Unit and property tests"]=420
    ["Simulation"]=420
    ["Mutation check"]=180
    ["Release build"]=200
    ["End to end with real clients"]=1200
    ["Console in a browser"]=180
    ["Benchmark smoke run"]=90
)
parts=()
took=()

# Begins a part, and ends the one before.
step() {
    end_part
    parts+=("$1")
    part_began=$SECONDS
    say "$1 ($((SECONDS - started)) s)"
}

end_part() {
    if ((${#parts[@]} > ${#took[@]})); then took+=($((SECONDS - part_began))); fi
}

# What each part took beside what it may.
times() {
    local i part mark
    end_part
    say "What each part took, and may take, in seconds"
    for i in "${!parts[@]}"; do
        part=${parts[i]}
        mark=
        if ((took[i] > ${MAY_TAKE[$part]:-0})); then mark="  <- over"; fi
        printf '   %-30s %5d  of %5s%s\n' "$part" "${took[i]}" "${MAY_TAKE[$part]:-?}" "$mark"
    done
}
# Also when a part fails: a hang that was cut off shows there.
trap 'status=$?; times; exit "$status"' EXIT

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
cargo test --locked --workspace --exclude hearth-e2e --no-fail-fast
# What threads share without a lock, in every order in which they can run.
cargo test --locked -p hearth-engine --features model model::

# With the checks a release leaves out, and as fast: what takes the time is the same code.
step "Simulation"
cargo build --locked -p hearth-sim -p hearth-bench
# With fewer worlds than that, some places are not reached.
all_paths=()
if ((${SEEDS:-10000} >= 10000)); then all_paths=(--all-paths); fi
"$(target_dir)/debug/hearth-sim" --seeds "${SEEDS:-10000}" "${all_paths[@]}"

step "Mutation check"
cargo test --locked -p hearth-sim --features mutations --test mutations --test ordering --test stale --test aftermath --test rescued --test evicted

# Real clients meet what users run.
step "Release build"
build_console
cargo build --release --locked -p hearth
export HEARTH_BIN="$(target_dir)/release/hearth"

# What Prometheus reads, judged by its own tool.
scripts/metrics-check.sh

# What packages would install; nothing is built for it.
scripts/package-check.sh

step "End to end with real clients"
CYCLES=${CYCLES:-5} cargo test --locked -p hearth-e2e --no-fail-fast -- --nocapture --test-threads=1

step "Console in a browser"
if [[ -e console/dist/index.html && -d console/node_modules ]]; then
    (cd console && npm test)
else
    note "skipped: the console's page was not built"
fi

step "Benchmark smoke run"
"$(target_dir)/debug/hearth-bench" --hearth "$HEARTH_BIN" --smoke

trap - EXIT
times
say "all passed in $((SECONDS - started)) s"
