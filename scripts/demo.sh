#!/usr/bin/env bash
# The demo behind `make run`: a pool and a disk on files in ./.demo, the disk's origin as slow as
# a hard disk (a model), a cold and a warm read, how to attach it, and serving until Ctrl-C.
# Started again it finds the pool and starts warm. HEARTH_DEMO_DIR puts it elsewhere.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
use_rust || die "no Rust 1.$RUST_MINOR_MIN or newer; run scripts/setup.sh"
cd "$ROOT"

demo=${HEARTH_DEMO_DIR:-$ROOT/.demo}
flash=$demo/flash
origin=$demo/disk.raw
run=$demo/run
# Socket paths have at most 107 characters.
short=
((${#run} < 90)) || run=$(TMPDIR=/tmp mktemp -d) short=$run
tidy() { [[ -z $short ]] || rm -rf -- "$short"; }
trap tidy EXIT
requests=1200

say "Building Hearth (some minutes, the first time)"
build_console
# Not the optimised build: that takes four times as long (docs/internals/testing.md).
cargo build --profile demo --locked -p hearth
hearth() { "$(target_dir)/demo/hearth" --run-dir "$run" "$@"; }

mkdir -p "$demo"
if [[ ! -e $origin ]]; then
    say "Making the slow disk: $origin, 1 GiB"
    note "it is served as slowly as a 7200 rpm hard disk is (a model), so that you need not have one"
    head -c 1G /dev/urandom >"$origin.new"
    mv "$origin.new" "$origin"
fi
if [[ ! -e $flash ]]; then
    say "Making the cache: $flash, 512 MiB"
    note "it stands for the SSD; Hearth calls it a pool"
    hearth pool create --flash "$flash" --size 512M --label demo >/dev/null
fi

say "Starting the daemon"
# In a session of its own: Ctrl-C is for this script, which then asks the daemon to stop. A second
# signal would end it without a checkpoint.
setsid "$(target_dir)/demo/hearth" serve --flash "$flash" --run-dir "$run" --state-dir "$demo/state" --log warn &
daemon=$!
stop() {
    trap - INT TERM HUP EXIT
    kill -TERM "$daemon" 2>/dev/null || true
    wait "$daemon" 2>/dev/null || true
    tidy
    note "stopped. make run starts it again, and what was cached still is; rm -r $demo removes the demo"
}
trap 'stop; exit 0' INT TERM HUP
trap stop EXIT
until [[ -S $run/api.sock ]] && hearth disk list >/dev/null 2>&1; do
    kill -0 "$daemon" 2>/dev/null || { trap tidy EXIT; die "the daemon did not start; what it said stands above"; }
    sleep 0.05
done
if ! hearth disk show demo >/dev/null 2>&1; then
    hearth disk add demo --origin "model-hdd:$origin" >/dev/null
    note "the slow disk is behind Hearth now, under the name demo"
    known=
else
    known=1
fi

# The same random addresses every time: the first pass reads them from the origin, later ones
# from flash. Prints requests per second.
pass() {
    fio --name=pass --ioengine=nbd --uri="nbd+unix:///demo?socket=$run/nbd.sock" --rw=randread --bs=4k \
        --iodepth=24 --size=1g --number_ios=$requests --randrepeat=1 --output-format=json |
        sed -n 's/^ *"iops" : \([0-9]*\)\..*/\1/p' | head -1
}

if command -v fio >/dev/null && fio --enghelp=nbd >/dev/null 2>&1; then
    say "Reading $requests random blocks of 4 KiB, 24 at a time (fio over NBD)"
    first=$(pass)
    if [[ -n $known ]]; then
        note "cached since the last time:      $first requests a second"
    else
        note "from the slow disk:              $first requests a second"
    fi
    # A block has to be asked for again before it is worth its place on flash.
    pass >/dev/null
    warm=$(pass)
    if [[ -n $known ]]; then
        note "the same blocks again:           $warm requests a second"
    else
        note "the same blocks from the cache:  $warm requests a second, $((warm / (first > 0 ? first : 1))) times as many"
    fi
else
    note "fio with its NBD engine is not here; no reads are timed"
fi

say "Give it to a VM"
note "arguments for qemu-system-x86_64:"
hearth attach-help demo --for qemu --over nbd
note "for libvirt or Proxmox: $(target_dir)/demo/hearth --run-dir $run attach-help demo --for libvirt"
note "more about this: docs/attach.md"

say "See what the cache does, in another terminal"
note "$(target_dir)/demo/hearth --run-dir $run stats --watch"

say "Running. Ctrl-C ends it"
wait "$daemon" || true
trap tidy EXIT
note "the daemon has ended"
