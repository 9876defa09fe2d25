#!/usr/bin/env bash
# Searches, without the seeds recorded so far, for worlds that reach every rare path and catch every deliberate fault.
# Fails if one is not found. The gate starts with the seeds this records (crates/sim/src/gate.rs).
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
use_rust || die "no Rust 1.$RUST_MINOR_MIN or newer; run scripts/setup.sh"
cd "$ROOT"
cargo build --release --locked -p hearth-sim --features mutations
found=$(mktemp)
trap 'rm -f "$found"' EXIT
"$(target_dir)/release/hearth-sim" --record "$found"
if cmp -s "$found" crates/sim/seeds/recorded.txt; then
    note "the recorded seeds are current"
elif [[ -n ${SEEDS_WRITE:-} ]]; then
    cp "$found" crates/sim/seeds/recorded.txt
    note "crates/sim/seeds/recorded.txt is new; commit it"
else
    note "the recorded seeds are stale; SEEDS_WRITE=1 scripts/seeds.sh writes new ones"
fi
