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

need_guest
if [[ -z ${HEARTH_BIN:-} ]]; then
    "$ROOT/scripts/build.sh"
    HEARTH_BIN=$(target_dir)/release/hearth
fi
export HEARTH_BIN
make_image
rm -rf "$work"
mkdir -p "$work/lab"
VERSION=0.0.1 COMPRESS=gzip "$ROOT/scripts/deb.sh" "$work/made"
mv "$work/made/hearth_0.0.1"_*.deb "$work/lab/hearth.deb"
rm -rf "$work/made"
install -m 755 "$ROOT/scripts/health-lab/start" "$work/lab/start"
install -m 644 "$ROOT/tests/e2e/smtp-server.py" "$work/lab/smtp-server.py"
make_guest_disks
# Drives that can be pulled out of a running system, known by their serial numbers; a drive that says of itself that it takes
# no writes any more; and one of this host, which says nothing.
GUEST_ARGS=(-device virtio-scsi-pci)
for serial in md-a md-b md-c lvm-a lvm-b lvm-c; do
    truncate -s 256M "$work/$serial.img"
    GUEST_ARGS+=(-drive "file=$work/$serial.img,format=raw,if=none,id=$serial,cache=unsafe"
        -device "scsi-hd,drive=$serial,serial=$serial")
done
truncate -s 64M "$work/dying.img" "$work/mute.img"
GUEST_ARGS+=(-drive "file=$work/dying.img,format=raw,if=none,id=dying"
    -device nvme,drive=dying,serial=dying,smart_critical_warning=0x8
    -drive "file=$work/mute.img,format=raw,if=virtio")
# It takes a quarter of that; a guest that does not come up says nothing.
LIMIT=2400
say "Judging arrays and drives in the guest"
boot_guest HEALTH-LAB || true
rm -rf "$work"
grep -q '^HEALTH-LAB END passed' "$base/console.log" || die "health failed in the guest, or the guest did not come to its end; its console is in $base/console.log"
