#!/usr/bin/env bash
# A storage VM, end to end: what it answered outlives kills, power cuts and the loss of a disk, and what the cache does for it.
#
#   scripts/storage-vm-lab.sh [ARGUMENTS OF hearth-bench]     e.g. --rounds 3 --seconds 30 --disk 256
#
# 1. Hearth in a guest with a disk and a piece of flash, whose power is cut under a client's changes (guest_storage).
# 2. A guest whose disk is a file of the datastore, over NFS: kills, power cuts, either of two directories lost (guest_second_hop).
# 3. The kernel's client of a guest: files and names under random operations (guest_files).
# 4. Two modelled hard disks and one flash file under a host like ESXi: one disk pulled and put back, the daemon killed
#    meanwhile (row storage-vm-loss); its heartbeats on one such disk (nfs-host); and the table: random reads and durable writes
#    of 4 KiB at depth 1 and 24, of a hard disk, the flash, the cache on and off (storage-vm-table).
#
# Needs root, for loop devices and a network of its own. GUEST_ROUNDS, WORK_OPERATIONS and WORK_NAMES say how long 1 to 3 work. Results of 4 go
# to bench/results/storage-vm.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
((EUID == 0)) || die "the storage VM's lab needs root, for loop devices and a network of its own: sudo scripts/storage-vm-lab.sh"
release_for_tests
cargo build --release --locked -p hearth-bench
export GUEST_ROUNDS=${GUEST_ROUNDS:-4} WORK_OPERATIONS=${WORK_OPERATIONS:-20000} WORK_NAMES=${WORK_NAMES:-4000}
cargo test --locked -p hearth-e2e --test guest_storage --test guest_second_hop --test guest_files -- --nocapture --test-threads=1
results=bench/results/storage-vm
"$(target_dir)/release/hearth-bench" --hearth "$HEARTH_BIN" --only storage-vm-loss,nfs-host,storage-vm-table --out "$results" "$@"
# A row that could not be measured is written down as one, and fails nothing by itself.
if grep -q '"failed"' "$results/latest.json"; then die "a row could not be measured, see above"; fi
