#!/bin/busybox sh
# The guest's init: no more than tests need. scripts/guest-lab.sh says what the words on the
# kernel's command line do.
export PATH=/usr/sbin:/usr/bin HOME=/root
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /tmp
say() { echo "HEARTH-GUEST $*" >/dev/console; }

read=0 fsck= agent= halt= root=/dev/vda
for word in $(cat /proc/cmdline); do
    case $word in
        root=*) root=${word#root=} ;;
        hearth.read=*) read=${word#*=} ;;
        hearth.fsck) fsck=1 ;;
        hearth.agent=*) agent=${word#*=} ;;
        hearth.halt) halt=1 ;;
    esac
done

if [ "$fsck" ]; then
    # Mounting replayed the journal; everything must be in order now, without a repair.
    e2fsck -f -n "$root" >/run/fsck 2>&1
    status=$?
    cat /run/fsck >/dev/console
    say "FSCK $status"
fi
mount -o remount,rw,discard / || { say "FAILED: the root cannot be mounted read-write"; poweroff -f; }
[ "$read" -gt 0 ] && (cd / && xargs cat <usr/lib/hearth-guest/read-order 2>/dev/null | head -c $((read * 1048576)) >/dev/null)
read -r up _ </proc/uptime
say "UP $up"
[ "$halt" ] && { sync; mount -o remount,ro /; poweroff -f; }
[ "$agent" ] && setsid /usr/lib/hearth-guest/agent "/dev/$agent" &
# The first process must not end, and buries the others' orphans.
while :; do
    wait
    sleep 1
done
