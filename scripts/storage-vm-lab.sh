#!/usr/bin/env bash
# A storage VM, end to end: what it answered outlives kills, power cuts and the loss of a disk, and what the cache does for it.
#
#   scripts/storage-vm-lab.sh [ARGUMENTS OF hearth-bench]     e.g. --rounds 3 --seconds 30 --disk 256
#
# 1. Hearth in a guest with a disk and a piece of flash, whose power is cut under a client's changes (guest_storage).
# 2. A guest whose disk is a file of the datastore, over NFS: kills, power cuts, either of two directories lost (guest_second_hop).
# 3. The kernel's client of a guest: files and names under random operations (guest_files).
# 4. Two modelled hard disks and one flash file under a host like ESXi: one disk pulled and put back, the daemon killed
#    meanwhile (row storage-vm-loss); its heartbeats on one such disk (nfs-host); its swap on flash alone, and a file that is kept
#    there (nfs-kept); and the table: random reads and durable writes of 4 KiB at depth 1 and 24, of a hard disk, the flash, the
#    cache on and off (storage-vm-table).
#
# Needs root, for loop devices and a network of its own. HEARTH_BIN names a binary to try instead of a new release build, with hearth-bench
# beside it. GUEST_ROUNDS, WORK_OPERATIONS and WORK_NAMES say how long 1 to 3 work. Results of 4 go
# to bench/results/storage-vm. It fails where anything of this was skipped or could not be measured; a goal that is missed is told and fails
# nothing, for that is a matter of how busy the machine was.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
((EUID == 0)) || die "the storage VM's lab needs root, for loop devices and a network of its own: sudo scripts/storage-vm-lab.sh"
ROWS=storage-vm-loss,nfs-host,nfs-kept,storage-vm-table

given=${HEARTH_BIN:-}
release_for_tests
if [[ -n $given ]]; then
    bench=$(dirname "$HEARTH_BIN")/hearth-bench
    [[ -x $bench ]] || die "there is no hearth-bench beside $HEARTH_BIN: cargo build -p hearth -p hearth-bench, with or without --release"
else
    cargo build --release --locked -p hearth-bench
    bench=$(target_dir)/release/hearth-bench
fi
export GUEST_ROUNDS=${GUEST_ROUNDS:-4} WORK_OPERATIONS=${WORK_OPERATIONS:-20000} WORK_NAMES=${WORK_NAMES:-4000}
e2e_tests --no-skips --only guest_storage guest_second_hop guest_files

results=bench/results/storage-vm
# What an earlier run has left says nothing of this one.
rm -f "$results/latest.json"
"$bench" --hearth "$HEARTH_BIN" "$@" --only "$ROWS" --out "$results"
# A row that could not be measured, or finds that it cannot be here, is written down as one, and fails nothing by itself.
[[ -s $results/latest.json ]] || die "nothing was measured"
if grep -E '"failed"|Not measured' "$results/latest.json"; then die "a row could not be measured, see above"; fi
