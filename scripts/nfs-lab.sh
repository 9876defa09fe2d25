#!/usr/bin/env bash
# What others wrote to try file systems with, on a datastore of the daemon, through the NFS client of a guest's kernel, while the daemon
# is killed beneath it again and again (guest_exercised): on one directory, then on two. And locks of two guests with Debian's statd, mounted
# without nolock (guest_locks).
#
#   scripts/nfs-lab.sh
#   LAB_PROGRAMS=~/fsx:~/fsstress LAB_WORK=$'fsx -N 9000 -HzCIJB0E a.img\nfsstress -c -d . -n 2000 -p 3' scripts/nfs-lab.sh
#
# fsx is the one of the crate `fsx`, which cargo fetches and builds below the target directory; it is no part of Hearth. Other programs are
# given by LAB_PROGRAMS (files, separated by colons, that run in a Debian guest) and LAB_WORK (a shell command a line). OPERATIONS says how long
# fsx works, LAB_ANSWERS how many answers a client has between two kills. HEARTH_BIN names a binary to try instead of a new release build.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
FSX_VERSION=0.3.2

release_for_tests
if [[ -z ${LAB_PROGRAMS:-} ]]; then
    place=$(target_dir)/nfs-lab
    cargo install --quiet --locked --root "$place" --version "$FSX_VERSION" fsx
    LAB_PROGRAMS=$place/bin/fsx
    # Two files that are disks of the cache, a large one and one as small as fsx usually has, and one that is none.
    tuned='[weights]\nclose_open = 2\ninvalidate = 2\ntruncate = 4\nfsync = 1\nfdatasync = 1\n'
    n=${OPERATIONS:-8000}
    LAB_WORK=$(
        cat <<END
printf 'flen = 6000000\n[opsize]\nmax = 200000\n$tuned' >/tmp/large.toml; fsx -N $((n / 2)) -S 1 -f /tmp/large.toml large.img
printf '$tuned' >/tmp/usual.toml; fsx -N $n -S 2 -f /tmp/usual.toml usual.img
printf '$tuned' >/tmp/small.toml; fsx -N $n -S 3 -f /tmp/small.toml small.log
END
    )
fi
# What guests need for locks: unpacked, not installed. LAB_STATD names a directory with the same.
if [[ -z ${LAB_STATD:-} ]]; then
    LAB_STATD=$(target_dir)/nfs-lab/statd
    if [[ ! -e $LAB_STATD/sbin/rpc.statd ]]; then
        new=$LAB_STATD.new
        rm -rf "$new" "$LAB_STATD"
        mkdir -p "$new/debs"
        (cd "$new/debs" && apt-get -qq download nfs-common rpcbind util-linux netbase libtirpc3 libtirpc-common libwrap0 libcap2 libsystemd0 \
            libgssapi-krb5-2 libkrb5-3 libk5crypto3 libkrb5support0 libcom-err2 libkeyutils1 libgcrypt20 libgpg-error0 liblzma5 libzstd1 liblz4-1)
        for deb in "$new"/debs/*.deb; do dpkg-deb -x "$deb" "$new"; done
        rm -rf "$new"/{debs,usr/share,usr/lib/python3}
        mv "$new" "$LAB_STATD"
    fi
fi
export LAB_PROGRAMS LAB_WORK LAB_STATD
e2e_tests --no-skips --only guest_exercised guest_locks
