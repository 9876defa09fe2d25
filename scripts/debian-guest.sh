# A Debian 12 guest with systemd and libvirt, installed once and booted emulated. Sourced, never run; needs scripts/lib.sh.
# Labs of the package begin with `begin_package_lab` and end with `end_package_lab`.
#
# Each run starts from the same fresh image; what it writes is thrown away. It brings a disk of its own,
# mounted at /lab, whose program `start` is run as root when the guest is up; when that ends, so does the guest. The guest has
# a disk of 140 GB, and a second one with a partition labelled "hearth". Lines on its console that begin with $1
# of `boot_guest` are shown without it.

PACKAGES=(systemd systemd-sysv udev dbus linux-image-cloud-amd64 python3 e2fsprogs fdisk kmod less iproute2 procps
    qemu-system-x86 qemu-utils libvirt-daemon-system libvirt-clients fio libnbd-bin nbd-client smartmontools
    mdadm lvm2 thin-provisioning-tools openssl python3-aiosmtpd)
DISK=140G
FLASH=4G
MEMORY=3G
# More of QEMU's arguments.
GUEST_ARGS=()
# Seconds until the guest must have ended by itself.
LIMIT=5400

base=$(target_dir)/docs-lab
work=$base/run

need() {
    command -v "$1" >/dev/null && return 0
    note "installing $2"
    apt-get -qq -y --no-install-recommends install "$2" </dev/null >/dev/null ||
        die "the lab needs $1, and the package $2 could not be installed"
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

# What the guest needs on this machine.
need_guest() {
    ((EUID == 0)) || die "the lab needs root, to install a guest"
    [[ $(dpkg --print-architecture 2>/dev/null) == amd64 ]] || die "the lab's guest is made of Debian's amd64 packages"
    need mmdebstrap mmdebstrap
    need gpgv gpgv
    need qemu-system-x86_64 qemu-system-x86
    need qemu-img qemu-utils
    need sfdisk fdisk
}

# The disks of a run: what is in $work/lab, a flash device, and what the guest writes over its image.
make_guest_disks() {
    truncate -s 600M "$work/lab.img"
    mke2fs -q -F -t ext4 -d "$work/lab" "$work/lab.img"
    truncate -s "$FLASH" "$work/flash.img"
    sfdisk -q "$work/flash.img" <<<$'label: gpt\nname=hearth'
    qemu-img create -q -f qcow2 -b "$image" -F raw "$work/root.qcow2"
}

boot_guest() {
    local drive=if=virtio,discard=unmap,detect-zeroes=unmap,cache=unsafe,aio=threads
    timeout "$LIMIT" qemu-system-x86_64 -accel tcg,thread=multi -cpu max -smp 2 -m "$MEMORY" \
        -nodefaults -display none -no-reboot -serial stdio \
        -kernel "$image.kernel" -initrd "$image.initrd" -append "root=/dev/vda rw console=ttyS0 quiet panic=1 systemd.show_status=no systemd.mask=serial-getty@ttyS0.service" \
        -drive "file=$work/root.qcow2,format=qcow2,$drive" \
        -drive "file=$work/flash.img,format=raw,$drive" \
        -drive "file=$work/lab.img,format=raw,if=virtio,readonly=on" "${GUEST_ARGS[@]}" \
        </dev/null | sed -u 's/\r//g' | tee "$base/console.log" | sed -un "s/^$1 //p"
}

# What a lab called $1 begins with: an empty run that brings scripts/$1/start, and Hearth's package in each of the versions that
# follow as hearth-VERSION.deb. Made of HEARTH_BIN, or of a binary that is built.
begin_package_lab() {
    local lab=$1 version
    shift
    need_guest
    if [[ -z ${HEARTH_BIN:-} ]]; then
        "$ROOT/scripts/build.sh"
        HEARTH_BIN=$(target_dir)/release/hearth
    fi
    export HEARTH_BIN
    make_image
    rm -rf "$work"
    mkdir -p "$work/lab"
    for version; do
        VERSION=$version COMPRESS=gzip "$ROOT/scripts/deb.sh" "$work/made"
        mv "$work/made/hearth_${version}"_*.deb "$work/lab/hearth-$version.deb"
    done
    rm -rf "$work/made"
    install -m 755 "$ROOT/scripts/$lab/start" "$work/lab/start"
}

# Adds a drive that says of itself that it takes no writes any more.
add_dying_drive() {
    truncate -s 64M "$work/dying.img"
    GUEST_ARGS+=(-drive "file=$work/dying.img,format=raw,if=none,id=dying"
        -device nvme,drive=dying,serial=dying,smart_critical_warning=0x8)
}

# Runs the lab called $1, which is over when its guest has said so. One that says REBOOT and goes down is booted again.
end_package_lab() {
    local mark=${1^^}
    boot_guest "$mark" || true
    if grep -q "^$mark REBOOT" "$base/console.log"; then
        mv "$base/console.log" "$base/console-before.log"
        boot_guest "$mark" || true
    fi
    rm -rf "$work"
    grep -q "^$mark END passed" "$base/console.log" ||
        die "the lab failed in the guest, or the guest did not come to its end; its console is in $base/console.log"
}
