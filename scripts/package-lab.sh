#!/usr/bin/env bash
# The package in a real system: installed on a Debian 12 with systemd and libvirt, started hardened, used, killed,
# upgraded under load, rebooted, removed and purged. What is done there is in scripts/package-lab/start.
#
# Needs root and 3 GiB of disk; takes some ten minutes, and one more the first time. HEARTH_BIN=FILE packages that
# binary instead of building one.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
# shellcheck source=scripts/debian-guest.sh
. "$ROOT/scripts/debian-guest.sh"

begin_package_lab package-lab 0.0.1 0.0.2
install -m 755 "$ROOT/scripts/docs-lab/run.py" "$ROOT/scripts/docs-lab/over_restart.py" "$work/lab/"
# What confines libvirt's guests; the other labs do without.
(cd "$work/lab" && apt-get -qq download apparmor) >/dev/null 2>&1 || note "SKIPPED: no package apparmor; guests are not confined"
mkdir -p "$work/lab/needrestart"
(cd "$work/lab/needrestart" && apt-get -qq download needrestart binutils binutils-common binutils-x86-64-linux-gnu \
    gettext-base libbinutils libctf0 libctf-nobfd0 libgprofng0 libintl-perl libjansson4 libmodule-find-perl \
    libproc-processtable-perl libsort-naturally-perl libterm-readkey-perl xz-utils) >/dev/null 2>&1 ||
    { rm -f "$work/lab/needrestart"/*.deb; note "SKIPPED: no package needrestart; whether it leaves the daemon alone is not tried"; }
make_guest_disks
add_dying_drive
say "Installing the package in the guest"
end_package_lab package-lab
