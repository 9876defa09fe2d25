#!/usr/bin/env bash
# The guest lab: a small Linux guest, made of the distribution's own packages, for tests and
# benchmarks that need a real kernel behind a Hearth disk.
#
#   scripts/guest-lab.sh image    make the guest unless it is there; prints its directory
#   scripts/guest-lab.sh boot     the same, then boot it once from a throwaway overlay
#   scripts/guest-lab.sh test     every guest test with all rounds (GUEST_ROUNDS, default 12)
#
# `image` prints one line on standard output, a directory (below the target directory, named by a
# hash of what goes into it) that holds, read-only:
#
#   kernel     for -kernel
#   initrd     for -initrd: busybox and the few modules it takes to mount the root file system
#   root.img   a raw ext4 file system without partition table: copy it (cp --no-preserve=mode) and
#              serve the copy
#   packages   what it was made of
#
# The shortest way to boot it (2 GiB or 192 MiB of RAM, it does not care; fio wants 192 MiB):
#
#   qemu-system-x86_64 -nodefaults -display none -no-reboot -m 256M -serial stdio \
#     -kernel $DIR/kernel -initrd $DIR/initrd -append 'console=ttyS0 root=/dev/vda quiet panic=-1' \
#     -drive file=copy-of-root.img,format=raw,if=virtio
#
# When everything that is started at boot has been started, the guest prints this line on the
# console, with the seconds since its kernel started (the equivalent of a login prompt):
#
#   HEARTH-GUEST UP 6.41
#
# If it cannot come up it prints `HEARTH-GUEST FAILED: why` and powers off (with -no-reboot and
# panic=-1 QEMU ends in every such case). More words on the kernel's command line:
#
#   hearth.read=MIB     before UP, read so many MiB of the root's files, always the same ones in the
#                       same order: the boot of a larger system
#   hearth.fsck         check the root, after its journal was replayed, before it is mounted
#                       read-write; prints `HEARTH-GUEST FSCK 0` (e2fsck's status) and its findings
#   hearth.agent=ttyS1  take commands on that serial port (docs/guest-lab.md has the protocol)
#   hearth.halt         power off once it is up
#
# Needs amd64 and apt's archive, no root: packages are only unpacked. HEARTH_GUEST_DIR puts the
# images elsewhere. Guests are emulated, which works everywhere; HEARTH_GUEST_ACCEL=kvm is faster
# where KVM works (a /dev/kvm that is there but does not work makes guests hang).
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

# Bytes of the root file system: what is in it takes about half.
ROOT_SIZE=640M
PARTS=$ROOT/scripts/guest
USERLAND=(busybox-static e2fsprogs fio)

# Standard output belongs to the answer.
tell() { printf '   %s\n' "$*" >&2; }

need_tools() {
    local tool
    for tool in apt-get dpkg-deb tar mke2fs zstd xz gzip flock qemu-system-x86_64; do
        if ! command -v "$tool" >/dev/null; then
            "$ROOT/scripts/setup.sh" test >&2
            break
        fi
    done
    for tool in apt-get dpkg-deb tar mke2fs flock; do
        command -v "$tool" >/dev/null || die "the guest lab needs $tool, and it could not be installed (the lab is made of Debian or Ubuntu packages)"
    done
}

# apt with a package state of its own, in which nothing is installed: what it would install is
# everything the guest needs. `lists` is where it knows packages from.
apt_here() {
    apt-get -qq -y -o Debug::NoLocking=1 -o APT::Sandbox::User="$(id -un)" \
        -o Dir::State::status="$work/status" -o Dir::State::lists="$lists" -o Dir::Cache="$work/cache" "$@" </dev/null
}

# Fetches the packages below $work/cache/archives, with the machine's own package lists or, if
# those are missing or too old, with fresh ones.
fetch() {
    local kernel
    mkdir -p "$work/cache/archives/partial" "$work/lists/partial"
    : >"$work/status"
    for lists in /var/lib/apt/lists "$work/lists"; do
        [[ $lists == /var/* ]] || apt_here update >&2 || true
        # Debian's name, then Ubuntu's.
        for kernel in linux-image-cloud-amd64 linux-image-virtual; do
            if apt_here --no-install-recommends --download-only install "$kernel" "${USERLAND[@]}" >"$work/apt.log" 2>&1; then
                return 0
            fi
            cat "$work/apt.log" >>"$work/apt.all"
        done
    done
    tell "what apt said:"
    grep -E '^[EW]:' "$work/apt.all" | sort -u | head -5 >&2 || true
    die "the guest's packages cannot be had from the package archive: check the network and apt's sources, then run scripts/guest-lab.sh image again"
}

# Unpacks all packages into $work/tree, with /bin, /sbin and /lib merged into /usr.
unpack() {
    local deb dir
    mkdir -p "$work/tree/usr"
    for dir in bin sbin lib lib64; do
        mkdir "$work/tree/usr/$dir"
        ln -s "usr/$dir" "$work/tree/$dir"
    done
    for deb in "$work"/cache/archives/*.deb; do
        dpkg-deb --fsys-tarfile "$deb" |
            tar -x --keep-directory-symlink --no-same-owner --no-same-permissions -C "$work/tree" -f -
    done
    rm -rf "$work"/tree/usr/share/{doc,man,info,locale,lintian}
}

# Prints the modules the initramfs loads, in the order of loading, as paths below /lib/modules.
# What a kernel has built in is not a module and drops out.
module_order() {
    awk -v wanted="virtio_pci virtio_blk virtio_scsi sd_mod" '
        { sub(/:/, "", $1); name = $1; sub(/.*\//, "", name); sub(/\.ko.*/, "", name); gsub(/-/, "_", name)
          path[name] = $1; $1 = ""; deps[name] = $0 }
        END {
            n = split(wanted, want)
            for (i = 1; i <= n; i++) {
                if (!(want[i] in path)) continue
                for (k = split(deps[want[i]], dep, " "); k > 0; k--) if (dep[k] && !seen[dep[k]]++) print dep[k]
                if (!seen[path[want[i]]]++) print path[want[i]]
            }
        }' "$1"
}

make_initrd() {
    local busybox=$work/tree/bin/busybox initrd=$work/initrd.tree version module name
    version=$(ls "$work/tree/lib/modules")
    "$busybox" depmod -b "$work/tree" "$version"
    mkdir -p "$initrd"/{bin,dev,proc,sys,root,modules}
    cp "$busybox" "$initrd/bin/busybox"
    cp "$PARTS/initrd.sh" "$initrd/init"
    chmod 755 "$initrd/init"
    module_order "$work/tree/lib/modules/$version/modules.dep" >"$work/modules"
    while read -r module; do
        name=$(basename "$module")
        module=$work/tree/lib/modules/$version/$module
        case $name in
            *.zst) zstd -qdc "$module" ;;
            *.xz) xz -dc "$module" ;;
            *.gz) gzip -dc "$module" ;;
            *) cat "$module" ;;
        esac >"$initrd/modules/${name%%.ko*}.ko"
        printf '%s\n' "${name%%.ko*}.ko" >>"$initrd/modules/order"
    done <"$work/modules"
    touch "$initrd/modules/order"
    (cd "$initrd" && find . | LC_ALL=C sort | "$busybox" cpio -o -H newc 2>/dev/null | gzip -n) >"$work/out/initrd"
}

make_root() {
    local tree=$work/tree applet
    mkdir -p "$tree"/{dev,proc,sys,run,tmp,root,mnt,etc} "$tree/usr/lib/hearth-guest"
    cp "$PARTS/init.sh" "$tree/usr/lib/hearth-guest/init"
    cp "$PARTS/agent.sh" "$tree/usr/lib/hearth-guest/agent"
    chmod 755 "$tree"/usr/lib/hearth-guest/*
    ln -sf /usr/lib/hearth-guest/init "$tree/usr/sbin/init"
    # Packages are not configured, so what their scripts would link is busybox's.
    for applet in $("$tree/bin/busybox" --list); do
        [[ -e $tree/usr/bin/$applet || -e $tree/usr/sbin/$applet || $applet == init ]] ||
            ln -s /bin/busybox "$tree/usr/bin/$applet"
    done
    ln -sf /bin/busybox "$tree/usr/bin/sh"
    printf 'root:x:0:0:root:/root:/bin/sh\n' >"$tree/etc/passwd"
    printf 'root:x:0:\n' >"$tree/etc/group"
    ls "$work/cache/archives" | sed -n 's/\.deb$//p' >"$work/out/packages"
    mv "$tree"/boot/vmlinuz-* "$work/out/kernel"
    chmod 644 "$work/out/kernel"
    rm -rf "$tree/boot"
    # What hearth.read reads, in this order.
    (cd "$tree" && find usr -type f -size +15k | LC_ALL=C sort) >"$work/read-order"
    mv "$work/read-order" "$tree/usr/lib/hearth-guest/read-order"
    # Nothing is left for the guest's kernel to initialise in the background.
    truncate -s "$ROOT_SIZE" "$work/out/root.img"
    mke2fs -q -F -t ext4 -L hearth-guest -U 68656172-7468-4775-a573-740000000001 \
        -E "root_owner=0:0,lazy_itable_init=0,lazy_journal_init=0,hash_seed=68656172-7468-4775-a573-740000000002" \
        -d "$tree" "$work/out/root.img" >&2
}

# Makes the guest unless it is there; leaves its directory in `image`.
make_image() {
    local base key suite work lists old
    [[ $(dpkg --print-architecture 2>/dev/null) == amd64 ]] ||
        die "the guest lab is made of amd64 packages of Debian or Ubuntu, and this machine has none"
    suite=$(. /etc/os-release && printf '%s-%s' "$ID" "${VERSION_CODENAME:-rolling}")
    key=$({ printf '%s\n' "$suite" && cat "${BASH_SOURCE[0]}" "$PARTS"/*; } | sha256sum | cut -c1-12)
    base=${HEARTH_GUEST_DIR:-$(target_dir)/guest-lab}
    mkdir -p "$base"
    base=$(cd "$base" && pwd)
    image=$base/$suite-$key
    [[ -d $image ]] && return 0
    need_tools
    # Two tests may ask at the same time.
    exec 9>"$base/lock"
    flock 9
    [[ -d $image ]] && return 0
    work=$base/making
    rm -rf "$work"
    mkdir -p "$work/out"
    tell "making the guest ($suite) in $image"
    fetch
    unpack
    make_initrd
    make_root
    # A guest that writes to it would change it for every other one.
    chmod a-w "$work"/out/*
    mv "$work/out" "$image"
    rm -rf "$work"
    # What an older script made for this distribution: nothing asks for it again.
    for old in "$base/$suite"-????????????; do
        [[ $old == "$image" || ! -d $old ]] || rm -rf "$old"
    done
}

boot_once() {
    local said
    said=$(mktemp)
    # shellcheck disable=SC2064 # the name as it is now
    trap "rm -f '$said'" EXIT
    timeout 300 qemu-system-x86_64 -accel "${HEARTH_GUEST_ACCEL:-tcg}" -nodefaults -display none -no-reboot -m 256M -serial stdio \
        -kernel "$image/kernel" -initrd "$image/initrd" \
        -append "console=ttyS0 root=/dev/vda quiet panic=-1 hearth.halt" \
        -drive "file=$image/root.img,format=raw,if=virtio,snapshot=on" </dev/null | tr -d '\r' | grep '^HEARTH-GUEST' >"$said" || true
    grep -Ex 'HEARTH-GUEST UP [0-9.]+' "$said" ||
        die "the guest did not come up: $(tail -n 1 "$said" | grep . || echo 'it said nothing')"
}

case ${1:-} in
    image)
        make_image
        printf '%s\n' "$image"
        ;;
    boot)
        make_image
        boot_once
        ;;
    test)
        use_rust || die "no Rust 1.$RUST_MINOR_MIN or newer; run scripts/setup.sh"
        cd "$ROOT"
        make_image
        cargo build --release --locked -p hearth
        export HEARTH_BIN="$(target_dir)/release/hearth"
        export RUST_LIB_BACKTRACE=0 GUEST_ROUNDS=${GUEST_ROUNDS:-12}
        e2e_tests --only guest_root guest_io guest_attach guest_nfs guest_storage guest_second_hop guest_files guest_mirrors crash_table datastore_clients
        ;;
    *) die "usage: scripts/guest-lab.sh image|boot|test (what they do stands at the top of the script)" ;;
esac
