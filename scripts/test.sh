#!/usr/bin/env bash
# The gate: all checks that must pass before a change is merged. docs/internals/testing.md describes the parts and
# what they cost; what takes too long for the gate is run by scripts/lab.sh.
#
# No test is retried, and no test asserts a duration. The gate as a whole has a limit: LIMIT seconds (4800).
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
export RUST_LIB_BACKTRACE=0
use_rust || die "no Rust 1.$RUST_MINOR_MIN or newer; run scripts/setup.sh"
cd "$ROOT"
LIMIT=${LIMIT:-4800}

# CPU seconds of each part on two cores, with nothing built before. A part that needs half as much again is marked in
# the table at the end. That fails nothing: machines differ.
declare -A BUDGET=(
    ["Format and documents"]=10
    ["Console page"]=30
    ["Build and lints"]=750
    ["Unit and integration tests"]=450
    ["Metrics and packages"]=30
    ["End-to-end tests, simulation"]=850
    ["Console in a browser"]=60
    ["Benchmark smoke run"]=100
)
# End-to-end modules that only the lab runs: emulated guests, of which guest_root, guest_attach, guest_nfs and
# guest_second_hop stay, and tests that need what a lab script prepares.
LAB_ONLY=(guest_io guest_files guest_storage guest_mirrors guest_exercised guest_locks datastore_clients::a_kernel_goes_on_while_the_daemon_is_killed
    ceph remote old_builds)
scratch=$(mktemp -d)
parts=()
walls=()
cpus=()

# Sets `cpu` to the CPU seconds of this script and of every process it waited for. Not in a subshell: that would count
# its own.
count_cpu() {
    times >"$scratch/times"
    cpu=$(awk '{ for (i = 1; i <= 2; i++) { split($i, t, /[ms]/); sum += t[1] * 60 + t[2] } } END { print int(sum) }' "$scratch/times")
}

# Ends the current part and begins the next.
part() {
    end_part
    parts+=("$1")
    part_began=$SECONDS
    count_cpu
    cpu_began=$cpu
    say "$1 ($SECONDS s)"
}

end_part() {
    if ((${#parts[@]} > ${#walls[@]})); then
        count_cpu
        walls+=($((SECONDS - part_began)))
        cpus+=($((cpu - cpu_began)))
    fi
}

table() {
    local i mark
    end_part
    say "Seconds of each part"
    printf '   %-28s %6s %6s %8s\n' part wall CPU budget
    for i in "${!parts[@]}"; do
        mark=
        if ((cpus[i] * 2 > ${BUDGET[${parts[i]}]} * 3)); then mark="  <- over budget"; fi
        printf '   %-28s %6d %6d %8d%s\n' "${parts[i]}" "${walls[i]}" "${cpus[i]}" "${BUDGET[${parts[i]}]}" "$mark"
    done
    count_cpu
    printf '   %-28s %6d %6d\n' all "$SECONDS" "$cpu"
}

# Also on failure: the table shows which part hung.
simulation_pid=
watchdog_pid=
finish() {
    local status=$?
    trap - EXIT
    [[ -z $simulation_pid ]] || kill -- "-$simulation_pid" 2>/dev/null || true
    [[ -z $watchdog_pid ]] || kill -- "-$watchdog_pid" 2>/dev/null || true
    table
    rm -rf -- "$scratch"
    if ((status == 0)); then say "all passed in $SECONDS s"; fi
    exit "$status"
}
trap finish EXIT

# In process groups of their own, so that they end with this script.
set -m
{
    sleep "$LIMIT"
    printf 'error: the gate took longer than %s s\n' "$LIMIT" >&2
    pkill -TERM -P $$
} </dev/null &
watchdog_pid=$!
set +m

part "Format and documents"
# Conflict markers in files that no compiler reads.
if git grep -nE '^(<{7}|>{7}) ' -- .; then die "conflict markers, see above"; fi
if cargo fmt --version >/dev/null 2>&1; then cargo fmt --all --check; else note "skipped: no rustfmt"; fi
if command -v python3 >/dev/null; then scripts/docs-check.py; else note "skipped: no python3"; fi
# The fuzz targets are a workspace of their own; the lab builds them.
(cd fuzz && cargo metadata --locked --format-version 1 >/dev/null) ||
    die "fuzz/Cargo.lock is not current; run cargo metadata in fuzz/ without --locked"

# Before the build, which embeds the page.
part "Console page"
build_console

# One build for everything below. A package built by itself would get other features, and most of its dependencies
# would be built again. `mutations` compiles the deliberate faults in; they have no effect unless a test selects one.
part "Build and lints"
if command -v clippy-driver >/dev/null; then
    # Clippy as the compiler of the workspace: a separate `cargo clippy` would check every dependency and every crate
    # of the workspace once more. cargo-clippy passes its flags with this separator.
    export RUSTC_WORKSPACE_WRAPPER=clippy-driver
    export CLIPPY_ARGS="-D__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__"
else
    note "no clippy: code is built without lints"
fi
everything=(--locked --workspace --features hearth-sim/mutations)
cargo build "${everything[@]}" --lib --bins --tests

export HEARTH_BIN="$(target_dir)/debug/hearth"
hearth_sim="$(target_dir)/debug/hearth-sim"

# What threads share without a lock, in every order in which they can run (loom). It needs another build of the engine.
part "Unit and integration tests"
scripts/run-tests.py --jobs 2 --below crates bench "${everything[@]}"
cargo test "${everything[@]}" --doc
cargo test --locked -p hearth-engine --lib --features model model::

part "Metrics and packages"
# promtool checks what Prometheus would read.
scripts/metrics-check.sh
# The contents of the packages; nothing is built for that.
scripts/package-check.sh

part "End-to-end tests, simulation"
# These tests mostly wait. The simulation runs alongside at idle priority: it computes, and measures no time.
set -m
(
    chrt --idle --pid 0 "$BASHPID" || renice -n 19 -p "$BASHPID"
    "$hearth_sim" --gate --jobs 1
) >"$scratch/simulation" 2>&1 </dev/null &
simulation_pid=$!
set +m
CYCLES=${CYCLES:-5} scripts/run-tests.py --jobs 4 --below tests/e2e --skip "${LAB_ONLY[@]}" "${everything[@]}"

status=0
wait "$simulation_pid" || status=$?
simulation_pid=
cat "$scratch/simulation"
((status == 0)) || die "the simulation failed, see above"

part "Console in a browser"
if [[ -e console/dist/index.html && -d console/node_modules ]]; then
    (cd console && npm test)
else
    note "skipped: the console page was not built"
fi

part "Benchmark smoke run"
"$(target_dir)/debug/hearth-bench" --hearth "$HEARTH_BIN" --smoke
