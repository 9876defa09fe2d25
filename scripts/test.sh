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
    ["Console in a browser"]=400
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
# Runs `cargo test` with what is said before and after `--`. Where no more than AGAIN_MOST tests fail, those are run once more,
# alone: many wait for real processes on a machine that others use as well. Whoever fails twice fails, and who
# passed only then is named at the end, for a test that sometimes fails is a fault of its own.
AGAIN_MOST=3
unsteady=()
tests() {
    local cargo_args=() out failed name
    while (($# > 0)) && [[ $1 != -- ]]; do
        cargo_args+=("$1")
        shift
    done
    (($# > 0)) && shift
    out=$(mktemp)
    if cargo test --locked --no-fail-fast "${cargo_args[@]}" -- "$@" 2>&1 | tee "$out"; then
        rm -f "$out"
        return 0
    fi
    # The last list of each program: names, four spaces before each.
    mapfile -t failed < <(awk '
        /^failures:$/ { on = 1; n = 0; next }
        /^test result:/ { for (i = 0; i < n; i++) print list[i]; on = 0; n = 0 }
        on && /^    [^ ]/ { list[n++] = substr($0, 5) }' "$out" | sort -u)
    # What is no test's failure is not tried again: a program that did not compile or was killed, an example in a comment.
    if ((${#failed[@]} == 0 || ${#failed[@]} > AGAIN_MOST)) ||
        printf '%s\n' "${failed[@]}" | grep -qvE '^[A-Za-z0-9_:]+$' ||
        grep -qE 'could not compile|exit successfully.*\(signal' "$out"; then
        rm -f "$out"
        return 1
    fi
    rm -f "$out"
    say "Once more: ${failed[*]}"
    cargo test --locked --no-fail-fast "${cargo_args[@]}" -- --exact "$@" "${failed[@]}" || return 1
    for name in "${failed[@]}"; do unsteady+=("$name"); done
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
tests --workspace --exclude hearth-e2e
# What threads share without a lock, in every order in which they can run.
cargo test --locked -p hearth-engine --features model model::

# With the checks a release leaves out, and as fast: what takes the time is the same code.
step "Simulation"
cargo build --locked -p hearth-sim -p hearth-bench
# With fewer worlds than that, some places are not reached.
all_paths=()
if ((${SEEDS:-10000} >= 10000)); then all_paths=(--all-paths); fi
"$(target_dir)/debug/hearth-sim" --seeds "${SEEDS:-10000}" "${all_paths[@]}"
# Pools of several devices, and devices that hang, are not among what the seeds choose.
for profile in devices devices-fail devices-change devices-flash-only areas areas-fail overdue twice-replaced; do
    "$(target_dir)/debug/hearth-sim" --profile "$profile" --seeds $((${SEEDS:-10000} / 30))
done

step "Mutation check"
cargo test --locked -p hearth-sim --features mutations --test mutations --test ordering --test stale --test aftermath --test rescued --test evicted

# Real clients meet what users run.
step "Release build"
build_console
# Without optimisation across crates, which takes minutes and which no test looks at.
CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 cargo build --release --locked -p hearth
export HEARTH_BIN="$(target_dir)/release/hearth"

# What Prometheus reads, judged by its own tool.
scripts/metrics-check.sh

# What packages would install; nothing is built for it.
scripts/package-check.sh

step "End to end with real clients"
export CYCLES=${CYCLES:-5}
tests -p hearth-e2e -- --nocapture --test-threads=1

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
for name in "${unsteady[@]}"; do note "UNSTEADY: $name failed, and passed when it was run once more"; done
say "all passed in $((SECONDS - started)) s"
