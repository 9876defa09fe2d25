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

DOCUMENTS=(README.md docs/attach.md docs/operations.md)
PARTS=$ROOT/scripts/docs-lab
PACKAGES=(systemd systemd-sysv udev dbus linux-image-cloud-amd64 python3 e2fsprogs fdisk kmod less iproute2 procps
    qemu-system-x86 qemu-utils libvirt-daemon-system libvirt-clients fio libnbd-bin nbd-client)
DISK=140G
FLASH=4G
MEMORY=3G
# Seconds until the guest must have ended by itself.
LIMIT=5400

base=$(target_dir)/docs-lab
work=$base/run

need() {
    command -v "$1" >/dev/null && return 0
    note "installing $2"
    apt-get -qq -y --no-install-recommends install "$2" </dev/null >/dev/null ||
        die "the documentation lab needs $1, and the package $2 could not be installed"
}

# Makes the guest's image unless it is there: $image, $image.kernel, $image.initrd.
make_image() {
    local key tree sources=()
    key=$({ printf '%s\n' "${PACKAGES[@]}" "$DISK"; sed -n '/^make_image/,/^}/p' "${BASH_SOURCE[0]}"; } | sha256sum | cut -c1-12)
    image=$base/bookworm-$key.img
    [[ -e $image ]] && return 0
    rm -rf "$base"
    tree=$base/tree
    mkdir -p "$base"
    # A Debian 12 knows best where its packages come from.
    if (. /etc/os-release && [[ ${VERSION_CODENAME:-} == bookworm ]]); then
        cat /etc/apt/sources.list.d/debian.sources >"$base/sources" 2>/dev/null ||
            cat /etc/apt/sources.list >"$base/sources"
        sources=("$base/sources")
    fi
    say "Installing the guest"
    mmdebstrap --quiet --variant=minbase --include="$(IFS=,; echo "${PACKAGES[*]}")" \
        --aptopt='APT::Install-Recommends "false"' bookworm "$tree" "${sources[@]}"
    mv "$tree"/boot/vmlinuz-* "$base/kernel"
    mv "$tree"/boot/initrd.img-* "$base/initrd"
    rm -rf "$tree"/var/cache/apt/* "$tree"/var/lib/apt/lists/*
    printf '/dev/vda / ext4 discard 0 1\n/dev/vdc /lab ext4 ro 0 0\n' >"$tree/etc/fstab"
    printf 'hearth-docs\n' >"$tree/etc/hostname"
    mkdir -p "$tree/lab" "$tree/root/hearth/target/release"
    cat >"$tree/etc/systemd/system/docs-lab.service" <<'UNIT'
[Unit]
Description=Run the documentation
After=multi-user.target libvirtd.socket
RequiresMountsFor=/lab

[Service]
Type=oneshot
WorkingDirectory=/root
Environment=HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin
ExecStart=/lab/start
ExecStopPost=/usr/bin/systemctl poweroff --no-block
StandardOutput=tty
StandardError=tty
TTYPath=/dev/ttyS0
TimeoutStartSec=infinity

[Install]
WantedBy=graphical.target
UNIT
    ln -s /etc/systemd/system/docs-lab.service "$tree/etc/systemd/system/multi-user.target.wants/"
    truncate -s "$DISK" "$image.new"
    mke2fs -q -F -t ext4 -i 65536 -d "$tree" "$image.new"
    rm -rf "$tree"
    mv "$base/kernel" "$image.kernel"
    mv "$base/initrd" "$image.initrd"
    mv "$image.new" "$image"
}

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
    truncate -s 300M "$work/lab.img"
    mke2fs -q -F -t ext4 -d "$work/lab" "$work/lab.img"
    truncate -s "$FLASH" "$work/flash.img"
    sfdisk -q "$work/flash.img" <<<$'label: gpt\nname=hearth'
    qemu-img create -q -f qcow2 -b "$image" -F raw "$work/root.qcow2"
}

boot() {
    local drive=if=virtio,discard=unmap,detect-zeroes=unmap,cache=unsafe,aio=threads
    timeout "$LIMIT" qemu-system-x86_64 -accel tcg,thread=multi -cpu max -smp 2 -m "$MEMORY" \
        -nodefaults -display none -no-reboot -serial stdio \
        -kernel "$image.kernel" -initrd "$image.initrd" -append "root=/dev/vda rw console=ttyS0 quiet systemd.show_status=no systemd.mask=serial-getty@ttyS0.service" \
        -drive "file=$work/root.qcow2,format=qcow2,$drive" \
        -drive "file=$work/flash.img,format=raw,$drive" \
        -drive "file=$work/lab.img,format=raw,if=virtio,readonly=on" \
        </dev/null | tr -d '\r' | tee "$base/console.log" | sed -un 's/^DOCS-LAB //p'
}

documents=("${@:-${DOCUMENTS[@]}}")
((EUID == 0)) || die "the documentation lab needs root, to install a guest"
[[ $(dpkg --print-architecture 2>/dev/null) == amd64 ]] || die "the documentation lab is made of Debian's amd64 packages"
need mmdebstrap mmdebstrap
need qemu-system-x86_64 qemu-system-x86
need qemu-img qemu-utils
need sfdisk fdisk
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
boot || true
rm -rf "$work"
if grep -q '^DOCS-LAB END passed' "$base/console.log"; then
    ((${#documents[@]} < ${#DOCUMENTS[@]})) || printf '%s, %s\n' "$commit" "$(date -u +%F)" >"$base/passed"
    note "passed on $commit"
else
    grep -q '^DOCS-LAB END' "$base/console.log" || note "the guest did not come to its end; its console is in $base/console.log"
    note "last passed on: $(cat "$base/passed" 2>/dev/null || echo 'never, on this machine')"
    exit 1
fi
