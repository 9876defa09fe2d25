#!/usr/bin/env bash
# Installs what is missing on a Debian or Ubuntu machine to build (`build`), run the demo
# (`run`), run the tests (`test`, `bench`) or the Ceph lab (`test`, then `ceph`). Installs nothing that
# is already there.
#
# With HEARTH_NO_INSTALL=1 it installs nothing and only says what is missing.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

purpose=${1:-build}
updated=

as_root() {
    if ((EUID == 0)); then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo "$@"
    else
        die "need root for: $* (run as root, or install sudo)"
    fi
}

apt_update() {
    [[ -n $updated ]] && return 0
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq update </dev/null || note "apt-get update failed; going on with the lists at hand"
    updated=1
}

apt_install() {
    apt_update
    note "installing: $*"
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install "$@" </dev/null >/dev/null
}

# True if the package archive offers package $1 (of at least 1.$2 if given).
apt_offers() {
    local version
    version=$(apt-cache policy "$1" 2>/dev/null | awk '/Candidate:/ { print $2 }')
    [[ -n $version && $version != "(none)" ]] || return 1
    [[ -z ${2:-} ]] && return 0
    [[ $version =~ ^([0-9]+:)?1\.([0-9]+) ]] && ((BASH_REMATCH[2] >= $2))
}

# Adds package $2 to `missing` unless command $1 exists.
want() { command -v "$1" >/dev/null || missing+=("$2"); }

missing=()
if [[ $purpose == ceph ]]; then
    want ceph-mon ceph-mon
    want ceph-mgr ceph-mgr
    want ceph-osd ceph-osd
    want rbd ceph-common
    want ip iproute2
    want uuidgen uuid-runtime
fi
want gcc build-essential
want make make
want curl curl
[[ -e /etc/ssl/certs/ca-certificates.crt ]] || missing+=(ca-certificates)
# The console's page is made by them; without them everything else is built.
if [[ $purpose == build || $purpose == run || $purpose == test ]]; then
    want node nodejs
    want npm npm
fi
if [[ $purpose == run || $purpose == test || $purpose == bench ]]; then
    want fio fio
    want nbdinfo libnbd-bin
fi
if [[ $purpose == test || $purpose == bench ]]; then
    want nbdkit nbdkit
    want qemu-nbd qemu-utils
    want qemu-storage-daemon qemu-system-common
    want qemu-system-x86_64 qemu-system-x86
    # QEMU opens images over iSCSI, ssh, NFS and https with these.
    compgen -G "/usr/lib/*/qemu/block-ssh.so" >/dev/null || missing+=(qemu-block-extra)
    # What scripts/guest-lab.sh makes a guest with.
    want mke2fs e2fsprogs
    want xz xz-utils
    want zstd zstd
    want flock util-linux
    want losetup mount
    want virt-xml-validate libvirt-clients
    want xmllint libxml2-utils
    # The console is tried in a browser.
    if ! command -v chromium >/dev/null && ! command -v google-chrome >/dev/null; then missing+=(chromium); fi
    # A directory as another host sees it.
    want bindfs bindfs
    # Another client of our NFS server.
    want nfs-ls libnfs-utils
    # Kills the daemon at a step of its work.
    want strace strace
    /usr/bin/python3 -c 'import nbd' 2>/dev/null || missing+=(python3-libnbd)
    # A mail server for alerts, and what drives say of themselves.
    /usr/bin/python3 -c 'import aiosmtpd' 2>/dev/null || missing+=(python3-aiosmtpd)
    [[ -x /usr/sbin/smartctl ]] || want smartctl smartmontools
fi

install_rust() {
    local minor package
    apt_update
    # A distribution's own toolchain first: it comes from where everything else comes from.
    if apt_offers rustc "$RUST_MINOR_MIN" && apt_offers cargo; then
        apt_install rustc cargo rustfmt rust-clippy && use_rust && return 0
    fi
    for package in $(apt-cache pkgnames rustc-1. | sort -rV); do
        minor=${package#rustc-1.}
        if [[ $minor =~ ^[0-9]+$ ]] && ((minor >= RUST_MINOR_MIN)) && apt_offers "cargo-1.$minor"; then
            apt_install "rustc-1.$minor" "cargo-1.$minor" || continue
            apt_install "rustfmt-1.$minor" "rust-1.$minor-clippy" || note "no rustfmt or clippy for Rust 1.$minor"
            use_rust && return 0
        fi
    done
    # Debian keeps a current compiler for its browsers under this name.
    if apt_offers rustc-web "$RUST_MINOR_MIN" && apt_offers cargo-web; then
        apt_install rustc-web cargo-web rustfmt-web rust-web-clippy && use_rust && return 0
    fi
    if ! command -v rustup >/dev/null && apt_offers rustup; then
        apt_install rustup || true
    fi
    if command -v rustup >/dev/null; then
        rustup toolchain install stable --profile minimal -c rustfmt -c clippy </dev/null && rustup default stable && use_rust && return 0
    fi
    note "no packaged Rust is new enough: using the official installer, sh.rustup.rs"
    curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs |
        sh -s -- -y -q --no-modify-path --profile minimal -c rustfmt -c clippy --default-toolchain stable
    use_rust
}

if ((${#missing[@]})); then
    [[ -n ${HEARTH_NO_INSTALL:-} ]] && die "missing packages: ${missing[*]} (unset HEARTH_NO_INSTALL to install them)"
    command -v apt-get >/dev/null || die "missing: ${missing[*]}; this script can install them on Debian and Ubuntu only"
    say "Installing what is missing"
    if ! apt_install "${missing[@]}"; then
        # One package that this release lacks must not take the others with it.
        for package in "${missing[@]}"; do
            apt_install "$package" || note "could not install $package; what needs it is skipped"
        done
    fi
fi

if ! use_rust; then
    [[ -n ${HEARTH_NO_INSTALL:-} ]] && die "no Rust 1.$RUST_MINOR_MIN or newer (unset HEARTH_NO_INSTALL to install it)"
    say "Installing Rust (1.$RUST_MINOR_MIN or newer is needed)"
    install_rust || die "could not install Rust 1.$RUST_MINOR_MIN or newer; install it from your distribution or https://rustup.rs and run make again"
fi
command -v gcc >/dev/null || command -v cc >/dev/null || die "no C compiler; install build-essential"
if [[ $purpose == test ]] && command -v rustup >/dev/null && ! cargo clippy --version >/dev/null 2>&1; then
    rustup component add clippy rustfmt </dev/null || note "no clippy or rustfmt; those checks are skipped"
fi
exit 0
