#!/usr/bin/env bash
# The remote lab: real iSCSI, ssh, NFS and web servers for the tests of images on other hosts
# (tests/e2e/tests/it/remote.rs), without installing them or touching the machine's own.
#
#   scripts/remote-lab.sh         fetch the servers' packages (once), build, and run the tests
#
# The packages (tgt, openssh-server, nfs-ganesha and what of their dependencies is missing) are only
# unpacked, below the target directory. The servers, the daemon and the tests run in a network and a
# mount namespace of their own: the ports are the usual ones, root's home and keys are made for the
# run, so is the only authority for certificates, and nothing of it is seen outside. Needs root, for
# the namespaces, and apt's archive, openssl and python3.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
use_rust || die "no Rust 1.$RUST_MINOR_MIN or newer; run scripts/setup.sh"
lab=$(target_dir)/remote-lab

fetch() {
    local deb
    [[ -d $lab/tree ]] && return 0
    command -v apt-get >/dev/null || die "the remote lab is made of Debian or Ubuntu packages"
    rm -rf "$lab/making" "$lab/cache"
    mkdir -p "$lab/making" "$lab/cache/archives/partial"
    note "fetching the servers' packages"
    apt-get -qq -y -o Debug::NoLocking=1 -o APT::Sandbox::User="$(id -un)" -o Dir::Cache="$lab/cache" \
        --no-install-recommends --reinstall --download-only install \
        tgt openssh-server nfs-ganesha nfs-ganesha-vfs rpcbind libwrap0 </dev/null >/dev/null ||
        die "the packages cannot be had from the package archive: check the network and apt's sources"
    for deb in "$lab"/cache/archives/*.deb; do dpkg-deb -x "$deb" "$lab/making"; done
    mv "$lab/making" "$lab/tree"
    rm -rf "$lab/cache"
}

# What the servers read. Paths are the lab's, users those of a passwd file that only they see.
configure() {
    local kind dir
    rm -rf "$lab/run"
    dir=$lab/run
    mkdir -p "$dir/home/.ssh" "$dir/share" "$dir/bin"
    chmod 700 "$dir/home" "$dir/home/.ssh"
    for kind in host client; do ssh-keygen -q -t ed25519 -N '' -f "$dir/$kind"; done
    mv "$dir/client" "$dir/home/.ssh/id_ed25519"
    mv "$dir/client.pub" "$dir/home/.ssh/authorized_keys"
    printf '127.0.0.1 %s\n' "$(cut -d' ' -f1,2 "$dir/host.pub")" >"$dir/home/.ssh/known_hosts"
    { grep -vE '^(root|sshd|_rpc):' /etc/passwd
      printf 'root:x:0:0:root:%s:/bin/sh\n' "$dir/home"
      printf '%s:x:65533:65534::/run:/usr/sbin/nologin\n' sshd _rpc; } >"$dir/passwd"
    printf '%s\n' "HostKey $dir/host" "ListenAddress 127.0.0.1" "PidFile none" "UsePAM no" "StrictModes no" \
        "PermitRootLogin yes" "AuthorizedKeysFile $dir/home/.ssh/authorized_keys" \
        "Subsystem sftp internal-sftp" >"$dir/sshd_config"
    # sshd wants to be called by its whole path.
    printf '#!/bin/sh\nexec %s "$@"\n' "$(server sshd)" >"$dir/bin/sshd-here"
    chmod 755 "$dir/bin/sshd-here"
    cp "$ROOT/scripts/remote-lab-web.py" "$dir/web.py"
    for kind in known unknown; do
        openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj "/CN=$kind.lab" \
            -addext "subjectAltName=IP:127.0.0.1" -keyout "$dir/$kind.key" -out "$dir/$kind.crt" 2>/dev/null
    done
    cat >"$dir/ganesha.conf" <<EOC
NFS_CORE_PARAM { NFS_Protocols = 3; Enable_NLM = false; Enable_RQUOTA = false; Plugins_Dir = $(dirname "$(find "$lab/tree" -name libfsalvfs.so)"); }
NFSV4 { Only_Numeric_Owners = true; UseGetpwnam = true; DomainName = "localdomain"; }
EXPORT {
    Export_Id = 1; Path = $dir/share; Pseudo = /share; Protocols = 3; Transports = TCP;
    Access_Type = RW; Squash = No_Root_Squash; SecType = sys; FSAL { Name = VFS; }
}
EOC
}

# The path of server $1, unpacked or installed.
server() {
    find "$lab/tree" -name "$1" -type f -perm -u+x | grep -m1 . || command -v "$1" || die "$1 is neither unpacked nor installed"
}

# Runs the command in a view of its own.
inside() {
    # shellcheck disable=SC2016 # it is the inner shell that expands
    unshare --mount --net --pid --fork --kill-child --mount-proc --propagation private bash -euc '
        lab=$1; shift
        ip link set lo up
        mount --bind "$lab/run/passwd" /etc/passwd
        mount --bind "$lab/run/known.crt" /etc/ssl/certs/ca-certificates.crt
        mount -t tmpfs none /run && mkdir -p /run/sshd /run/rpcbind
        mount -t tmpfs none /var/lib && mkdir -p /var/lib/nfs/ganesha
        libraries=$(find "$lab/tree" -name "*.so*" -printf "%h\n" | sort -u | paste -sd:)
        programs=$(find "$lab/tree" -type d -path "*bin" | paste -sd:)
        export PATH=$lab/run/bin:$PATH:$programs LD_LIBRARY_PATH=$libraries
        rpcbind -f &
        export HEARTH_REMOTE_LAB=$lab/run
        "$@"' inside "$lab" "$@"
}

((EUID == 0)) || die "the remote lab needs root, for namespaces of its own: sudo scripts/remote-lab.sh"
cd "$ROOT"
export RUST_LIB_BACKTRACE=0
fetch
configure
cargo build --locked -p hearth
cargo test --locked -p hearth-e2e --no-run
inside scripts/run-tests.py --jobs 1 --verbose --below tests/e2e --only "${@:-remote}" --locked --offline -p hearth-e2e
