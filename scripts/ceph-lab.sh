#!/usr/bin/env bash
# The Ceph lab: a real, small Ceph cluster for the tests of disks on RBD images (tests/e2e/tests/it/ceph.rs).
#
#   scripts/ceph-lab.sh           build, start the cluster, run the tests, end the cluster
#   scripts/ceph-lab.sh shell     the same cluster with a shell in it
#
# One monitor, one manager and three object stores on sparse files, with real keys (cephx), all in one
# folder below the target directory, without systemd. Cluster and tests run in namespaces of their own
# (network, mount, processes): a bridge with the cluster at 10.99.0.1 and two "hosts", the network
# namespaces hearth-a and hearth-b, at 10.99.0.2 and 10.99.0.3, so that each host is a client of its own
# that can be shut out by its address. When the script ends, the kernel ends all of it. Needs root, and
# the packages ceph-mon, ceph-mgr, ceph-osd, ceph-common and qemu-block-extra (scripts/setup.sh ceph).
# With the cluster at rest it takes about half a GiB of memory; the files take what is written.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

OSDS=3
OSD_BYTES=4G
# Longest wait for the cluster to be ready.
READY_SECONDS=180
CLUSTER=10.99.0.1

# Waits until the command succeeds.
await() {
    local what=$1 end=$((SECONDS + READY_SECONDS))
    shift
    until "$@" >/dev/null 2>&1; do
        ((SECONDS < end)) || die "$what: not within $READY_SECONDS s; its logs are in $lab/log"
        sleep 0.2
    done
}

configure() {
    local fsid
    fsid=$(uuidgen)
    mkdir -p "$lab"/{log,run,mon,mgr,osd}
    cat >"$lab/ceph.conf" <<EOC
[global]
fsid = $fsid
mon host = [v2:$CLUSTER:3300,v1:$CLUSTER:6789]
public network = 10.99.0.0/24
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
keyring = $lab/keyring
run dir = $lab/run
admin socket = $lab/run/\$cluster-\$name.\$pid.asok
pid file = $lab/run/\$name.pid
log file = $lab/log/\$name.\$pid.log
log to stderr = false
err to stderr = true
crash dir = $lab/log
setuser match path =
osd crush chooseleaf type = 0
osd pool default size = 2
osd pool default min size = 1
osd pool default pg autoscale mode = off
mon data avail warn = 1
mon data avail crit = 1
mon warn on pool no redundancy = false
mon warn on insecure global id reclaim = false
mon warn on insecure global id reclaim allowed = false
mon allow pool delete = true
osd memory target = 939524096
bluestore cache autotune = false
bluestore cache size = 33554432
bluestore block size = 4294967296
osd max pg log entries = 500
osd min pg log entries = 100
[client]
log file = $lab/log/\$name.\$pid.log
[mon.a]
mon data = $lab/mon/a
[mgr.x]
mgr data = $lab/mgr/x
[osd]
osd data = $lab/osd/\$id
keyring = $lab/osd/\$id/keyring
osd journal =
EOC
    export CEPH_CONF=$lab/ceph.conf
    ceph-authtool --create-keyring "$lab/keyring" --gen-key -n mon. --cap mon 'allow *' >/dev/null
    ceph-authtool "$lab/keyring" --gen-key -n client.admin --cap mon 'allow *' --cap osd 'allow *' --cap mgr 'allow *' --cap mds 'allow *'
    # What documentation tells people to give a host: no more than that must do.
    ceph-authtool "$lab/keyring" --gen-key -n client.hearth --cap mon 'profile rbd' --cap osd 'profile rbd pool=rbd'
    ceph-authtool "$lab/keyring" --gen-key -n mgr.x --cap mon 'allow profile mgr' --cap osd 'allow *' --cap mds 'allow *'
    monmaptool --create --fsid "$fsid" --addv a "[v2:$CLUSTER:3300,v1:$CLUSTER:6789]" "$lab/monmap" >/dev/null
}

start_osd() {
    ceph-osd -i "$1" >>"$lab/log/start.log" 2>&1
}

cluster() {
    local id uuid secret
    configure
    ceph-mon --mkfs -i a --monmap "$lab/monmap" --keyring "$lab/keyring"
    ceph-mon -i a
    await "the monitor" ceph --connect-timeout 5 mon stat
    ceph-mgr -i x >>"$lab/log/start.log" 2>&1
    for ((id = 0; id < OSDS; id++)); do
        uuid=$(uuidgen)
        secret=$(ceph-authtool --gen-print-key)
        mkdir -p "$lab/osd/$id"
        echo "{\"cephx_secret\": \"$secret\"}" | ceph osd new "$uuid" "$id" -i - >/dev/null
        ceph-authtool --create-keyring "$lab/osd/$id/keyring" --name "osd.$id" --add-key "$secret" >/dev/null
        truncate -s "$OSD_BYTES" "$lab/osd/$id/block"
        ceph-osd -i "$id" --mkfs --osd-uuid "$uuid" --no-mon-config --keyring "$lab/osd/$id/keyring" >>"$lab/log/start.log" 2>&1
        start_osd "$id"
    done
    ceph osd pool create rbd 16 16 >/dev/null 2>&1
    await "the pool" bash -c 'ceph -f json pg stat | grep -q "\"num_pg_by_state\":\[{\"name\":\"active+clean\",\"num\":[0-9]*}\]"'
    rbd pool init rbd
}

# Two hosts beside the cluster.
network() {
    local host at=2
    mount -t tmpfs none /run/netns 2>/dev/null || { mkdir -p /run/netns; mount -t tmpfs none /run/netns; }
    ip link set lo up
    ip link add hearth-br type bridge
    ip addr add "$CLUSTER/24" dev hearth-br
    ip link set hearth-br up
    for host in a b; do
        ip netns add "hearth-$host"
        ip link add "veth-$host" type veth peer name eth0 netns "hearth-$host"
        ip link set "veth-$host" master hearth-br up
        ip -n "hearth-$host" addr add "10.99.0.$at/24" dev eth0
        ip -n "hearth-$host" link set eth0 up
        ip -n "hearth-$host" link set lo up
        at=$((at + 1))
    done
}

# Memory of the cluster's processes, in MiB.
memory() {
    local pid sum=0
    for pid in $(cat "$lab"/run/*.pid); do
        sum=$((sum + $(awk '/^VmRSS/ { print $2 }' "/proc/$pid/status")))
    done
    echo $((sum / 1024))
}

inside() {
    local from=$SECONDS
    network
    cluster
    note "the cluster is ready after $((SECONDS - from)) s and takes $(memory) MiB of memory"
    export HEARTH_CEPH_LAB=$lab
    "$@"
}

lab=$(target_dir)/ceph-lab
case ${1:-test} in
inside)
    shift
    inside "$@"
    ;;
test | shell)
    ((EUID == 0)) || die "the Ceph lab needs root, for namespaces of its own: sudo scripts/ceph-lab.sh"
    for program in ceph-mon ceph-mgr ceph-osd ceph rbd rados; do
        command -v "$program" >/dev/null || die "$program is missing; run scripts/setup.sh ceph"
    done
    what=${1:-test}
    (($# == 0)) || shift
    cd "$ROOT"
    export RUST_LIB_BACKTRACE=0
    rm -rf "$lab"
    mkdir -p "$lab"
    if [[ $what == test ]]; then
        use_rust || die "no Rust 1.$RUST_MINOR_MIN or newer; run scripts/setup.sh"
        cargo build --locked -p hearth
        cargo test --locked -p hearth-e2e --no-run
        set -- scripts/run-tests.py --jobs 1 --verbose --below tests/e2e --only "${@:-ceph}" --locked --offline -p hearth-e2e
    elif (($# == 0)); then
        set -- bash
    fi
    unshare --net --mount --pid --fork --kill-child --mount-proc --propagation private "${BASH_SOURCE[0]}" inside "$@"
    rm -rf "$lab"
    ;;
*) die "usage: scripts/ceph-lab.sh [test [TEST-ARGS] | shell [COMMAND]]" ;;
esac
