#!/usr/bin/env bash
# The documentation lab: does README.md, docs/attach.md and docs/operations.md work as written, on a
# fresh Debian 12 with systemd and libvirt?
#
#   scripts/docs-lab.sh             make the guest (once), build, run every command block
#   scripts/docs-lab.sh README.md   only that document (those after README.md need its disk)
#
# The guest is installed from Debian's packages with mmdebstrap, below the target directory, and
# booted with QEMU, emulated. Each run starts from the same fresh image; what it writes is thrown
# away. Which blocks are run, and how, is said in scripts/docs-lab/run.py. The guest has what a
# reader is asked to have: the binary in target/release of a checkout in /root/hearth, a disk of
# 140 GB, and a second one with a partition labelled "hearth". Needs root and 4 GiB of disk; takes
# ten minutes and more, most of it for a flash file of 100 GB (only zeros reach this machine's disk,
# and take no room there).
#
# HEARTH_BIN=FILE runs that binary instead of building one.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
# shellcheck source=scripts/debian-guest.sh
. "$ROOT/scripts/debian-guest.sh"

DOCUMENTS=(README.md docs/attach.md docs/operations.md)
PARTS=$ROOT/scripts/docs-lab

# What this run brings: the binary, the documents, what runs them.
make_lab_disk() {
    local document
    rm -rf "$work"
    mkdir -p "$work/lab"
    install -m 755 "$hearth" "$work/lab/hearth"
    for document in "${documents[@]}"; do
        install -D -m 644 "$ROOT/$document" "$work/lab/$document"
    done
    install -m 755 "$PARTS/run.py" "$PARTS/over_restart.py" "$work/lab/"
    printf '#!/bin/sh\ncp /lab/hearth /root/hearth/target/release/hearth\nexec /lab/run.py %s\n' "${documents[*]}" >"$work/lab/start"
    chmod 755 "$work/lab/start"
    make_guest_disks
}

documents=("${@:-${DOCUMENTS[@]}}")
need_guest
hearth=${HEARTH_BIN:-}
if [[ -z $hearth ]]; then
    use_rust || die "no Rust 1.$RUST_MINOR_MIN or newer; run scripts/setup.sh"
    (cd "$ROOT" && cargo build --release --locked -p hearth)
    hearth=$(target_dir)/release/hearth
fi
make_image
make_lab_disk
commit=$(git -C "$ROOT" describe --always --dirty 2>/dev/null || echo 'no git')
say "Running ${documents[*]} of $commit"
boot_guest DOCS-LAB || true
rm -rf "$work"
if grep -q '^DOCS-LAB END passed' "$base/console.log"; then
    ((${#documents[@]} < ${#DOCUMENTS[@]})) || printf '%s, %s\n' "$commit" "$(date -u +%F)" >"$base/passed"
    note "passed on $commit"
else
    grep -q '^DOCS-LAB END' "$base/console.log" || note "the guest did not come to its end; its console is in $base/console.log"
    note "last passed on: $(cat "$base/passed" 2>/dev/null || echo 'never, on this machine')"
    exit 1
fi
