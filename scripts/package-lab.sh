#!/usr/bin/env bash
# The package in a real system: installed on a Debian 12 with systemd and libvirt, started hardened, used, killed,
# upgraded under load, removed and purged. What is done there is in scripts/package-lab/start.
#
# Needs root and 3 GiB of disk; takes five minutes, and one more the first time. HEARTH_BIN=FILE packages that
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
for version in 0.0.1 0.0.2; do
    VERSION=$version COMPRESS=gzip "$ROOT/scripts/deb.sh" "$work/made"
    mv "$work/made/hearth_${version}"_*.deb "$work/lab/hearth-$version.deb"
done
rm -rf "$work/made"
install -m 755 "$ROOT/scripts/package-lab/start" "$work/lab/start"
make_guest_disks
# A drive that says of itself that it takes no writes any more.
truncate -s 64M "$work/dying.img"
GUEST_ARGS=(-drive "file=$work/dying.img,format=raw,if=none,id=dying"
    -device nvme,drive=dying,serial=dying,smart_critical_warning=0x8)
say "Installing the package in the guest"
boot_guest PACKAGE-LAB || true
rm -rf "$work"
grep -q '^PACKAGE-LAB END passed' "$base/console.log" || die "the package failed in the guest, or the guest did not come to its end; its console is in $base/console.log"
