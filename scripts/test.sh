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

# What each part may take, in seconds, on two cores with nothing built before: half as much again as it takes there, or so. A part that
# takes longer is marked at the end and fails nothing, for machines differ. All of it has 35 minutes; what does not fit
# belongs into scripts/lab.sh.
declare -A MAY_TAKE=(
    ["Format"]=10
    ["Documents"]=10
    ["Console's page"]=60
    ["Lints"]=180
    ["Build"]=800
    ["Unit and property tests"]=400
    ["Metrics and packages"]=90
    ["End to end with real clients"]=900
    ["Console in a browser"]=300
    ["Simulation, what is left of it"]=200
    ["Benchmark smoke run"]=180
)
ALL_MAY_TAKE=2100
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
        printf '   %-31s %5d  of %5s%s\n' "$part" "${took[i]}" "${MAY_TAKE[$part]:-?}" "$mark"
    done
    mark=
    if ((SECONDS - started > ALL_MAY_TAKE)); then mark="  <- over"; fi
    printf '   %-31s %5d  of %5d%s\n' "All" "$((SECONDS - started))" "$ALL_MAY_TAKE" "$mark"
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
beside=
trap 'status=$?; [[ -z $beside ]] || kill -- "-$beside" || true; times; exit "$status"' EXIT

step "Format"
# Left behind by a merge, they break files no compiler reads.
if git grep -nE '^(<{7}|>{7}) ' -- .; then die "conflict markers, see above"; fi
if cargo fmt --version >/dev/null 2>&1; then cargo fmt --all --check; else note "skipped: no rustfmt"; fi

step "Documents"
if command -v python3 >/dev/null; then scripts/docs-check.py; else note "skipped: no python3"; fi

# Before anything is compiled: what is compiled without the page is compiled again once there is one.
step "Console's page"
build_console

step "Lints"
if cargo clippy --version >/dev/null 2>&1; then
    cargo clippy --locked --workspace --all-targets -- -D warnings
else
    note "skipped: no clippy"
fi
# The fuzz targets are a workspace of their own, which nothing here builds.
(cd fuzz && cargo metadata --locked --format-version 1 >/dev/null) ||
    die "fuzz/Cargo.lock is not current; run cargo metadata in fuzz/ without --locked"

# Whatever is run below comes out of one build: a part asked for by itself gets other features, and most of what it needs is built once
# more for them. The feature is that of the mutation check, and changes nothing unless a fault is asked for. What users run, fully
# optimised, is built by `make run`; scripts/released.sh has real clients meet that.
step "Build"
everything=(--workspace --features hearth-sim/mutations)
cargo build --locked "${everything[@]}" --all-targets

# The mutation check is among them, but for its longest part.
step "Unit and property tests"
tests "${everything[@]}" --exclude hearth-e2e -- --skip every_fault_is_caught
# What threads share without a lock, in every order in which they can run.
cargo test --locked -p hearth-engine --lib --features model model::

step "Metrics and packages"
export HEARTH_BIN="$(target_dir)/debug/hearth"
# What Prometheus reads, judged by its own tool.
scripts/metrics-check.sh

# What packages would install; nothing is built for it.
scripts/package-check.sh

# With the checks a release leaves out, and as fast: what takes the time is the same code.
simulation() {
    local all_paths=() profile
    # With fewer worlds than that, some places are not reached.
    if ((${SEEDS:-10000} >= 10000)); then all_paths=(--all-paths); fi
    "$(target_dir)/debug/hearth-sim" --jobs 1 --seeds "${SEEDS:-10000}" "${all_paths[@]}"
    # Pools of several devices, and devices that hang or rot, are not among what the seeds choose.
    for profile in devices devices-fail devices-change devices-flash-only areas areas-fail overdue twice-replaced twice-rot-crash; do
        "$(target_dir)/debug/hearth-sim" --jobs 1 --profile "$profile" --seeds $((${SEEDS:-10000} / 30))
    done
    # Each fault that is put into the engine on purpose is caught.
    scripts/run-tests.py --below crates/sim --locked "${everything[@]}" --test mutations
}

step "End to end with real clients"
# Most of these tests, and of the console's, wait most of the time. The simulation, which only computes and judges no time, gets what they
# leave over (SCHED_IDLE: whoever else wants a processor has it at once), in a group of its own, so that it can be ended with this script.
simulated=$(mktemp)
set -m
(
    chrt --idle --pid 0 "$BASHPID" || renice -n 19 -p "$BASHPID"
    simulation
) >"$simulated" 2>&1 </dev/null &
beside=$!
set +m
export CYCLES=${CYCLES:-5}
passed_again=$(mktemp)
scripts/run-tests.py --jobs 3 --below tests/e2e --unsteady "$passed_again" --locked "${everything[@]}"
mapfile -t -O "${#unsteady[@]}" unsteady <"$passed_again"
rm -f "$passed_again"

step "Console in a browser"
if [[ -e console/dist/index.html && -d console/node_modules ]]; then
    (cd console && npm test)
else
    note "skipped: the console's page was not built"
fi

step "Simulation, what is left of it"
outcome=0
wait "$beside" || outcome=$?
beside=
cat "$simulated"
rm -f "$simulated"
((outcome == 0)) || die "the simulation failed, see above"

step "Benchmark smoke run"
"$(target_dir)/debug/hearth-bench" --hearth "$HEARTH_BIN" --smoke

trap - EXIT
times
for name in "${unsteady[@]}"; do note "UNSTEADY: $name failed, and passed when it was run once more"; done
say "all passed in $((SECONDS - started)) s"
