#!/bin/busybox sh
# The guest's first program: loads what it takes to see the root disk, mounts it read-only (which
# replays its journal) and hands over to the init in it.
bb=/bin/busybox
fail() {
    echo "HEARTH-GUEST FAILED: $*"
    $bb poweroff -f
}
$bb mount -t devtmpfs dev /dev
$bb mount -t proc proc /proc
$bb mount -t sysfs sys /sys
for module in $($bb cat /modules/order); do
    $bb insmod "/modules/$module" || fail "module $module"
done
root=/dev/vda
for word in $($bb cat /proc/cmdline); do
    case $word in root=*) root=${word#root=} ;; esac
done
# A disk may show up late: 30 s at most.
tries=300
until [ -b "$root" ]; do
    tries=$((tries - 1))
    [ $tries -gt 0 ] || fail "there is no $root"
    $bb sleep 0.1
done
$bb mount -t ext4 -o ro "$root" /root || fail "$root cannot be mounted"
for dir in dev proc sys; do $bb mount --move /$dir /root/$dir; done
exec $bb switch_root /root /sbin/init
