#!/usr/bin/env bash
# Builds and runs `hearth bench` with its defaults, results in bench/results/vm; arguments go to it.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
use_rust || die "no Rust 1.$RUST_MINOR_MIN or newer; run scripts/setup.sh"
cd "$ROOT"
cargo build --release --locked -p hearth
mkdir -p .bench
# The boot storm wants a guest; where none can be made, the other tables are still measured.
storm=()
if [[ " $* " != *" --quick "* && " $* " != *" --guest "* && " $* " != *" compare "* ]]; then
    if guest=$(scripts/guest-lab.sh image); then
        storm=(--guest "$guest")
    else
        note "no guest, so no boot storm"
    fi
fi
# The project's goals are for those who work on it; `compare` takes no such word.
goals=(--goals)
[[ " $* " != *" compare "* ]] || goals=()
exec "$(target_dir)/release/hearth" bench "${goals[@]}" --flash .bench --out bench/results/vm "${storm[@]}" "$@"
