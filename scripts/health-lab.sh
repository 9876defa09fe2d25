#!/usr/bin/env bash
# What lies under an origin fails, is replaced and rebuilt, in a real system: a mirror of md and one of LVM whose members are
# pulled out, and a drive that says it is dying. Hearth's package judges it, and tells by mail. What is done there is in
# scripts/health-lab/start.
#
# Needs root and 3 GiB of disk; takes some minutes, and one more the first time. HEARTH_BIN=FILE packages that
# binary instead of building one.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
# shellcheck source=scripts/debian-guest.sh
. "$ROOT/scripts/debian-guest.sh"

begin_package_lab health-lab 0.0.1
install -m 644 "$ROOT/tests/e2e/smtp-server.py" "$work/lab/smtp-server.py"
make_guest_disks
# Drives that can be pulled out of a running system, known by their serial numbers; one that is dying; and one of this host,
# which says nothing.
GUEST_ARGS=(-device virtio-scsi-pci)
for serial in md-a md-b md-c lvm-a lvm-b lvm-c; do
    truncate -s 256M "$work/$serial.img"
    GUEST_ARGS+=(-drive "file=$work/$serial.img,format=raw,if=none,id=$serial,cache=unsafe"
        -device "scsi-hd,drive=$serial,serial=$serial")
done
add_dying_drive
truncate -s 64M "$work/mute.img"
GUEST_ARGS+=(-drive "file=$work/mute.img,format=raw,if=virtio")
# It takes a quarter of that; a guest that does not come up says nothing.
LIMIT=2400
say "Judging arrays and drives in the guest"
end_package_lab health-lab
