#!/usr/bin/env bash
# Lets each I/O of fixed workloads fail alone, then simulates $1 worlds, the first with seed $2, and every thirtieth as
# many of each profile that random worlds never choose. A failure prints how to repeat it.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
use_rust || die "no Rust 1.$RUST_MINOR_MIN or newer; run scripts/setup.sh"
cd "$ROOT"
seeds=${1:-10000}
start=${2:-0}
cargo build --release --locked -p hearth-sim
sim="$(target_dir)/release/hearth-sim"
"$sim" --single
"$sim" --gate
for profile in $("$sim" --own-runs); do
    "$sim" --profile "$profile" --start "$start" --seeds $((seeds / 30 + 1))
done
exec "$sim" --start "$start" --seeds "$seeds"
