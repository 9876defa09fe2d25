#!/bin/busybox sh
# Runs commands that come over a serial port ($1), side by side.
#
# In: lines "ID COMMAND…". Out: for every command that has ended a line "\001ID STATUS LENGTH" and
# then LENGTH bytes, what the command printed (both streams). The first line out is "\001ready 0 0".
dir=/run/agent
mkdir -p $dir
mkfifo $dir/ended
exec 3<>"$1" 4<>$dir/ended
stty raw -echo <&3
# One writer, so that answers do not mix; a line in a pipe arrives whole.
while read -r id status <&4; do
    printf '\001%s %s %s\n' "$id" "$status" "$(stat -c %s $dir/$id)" >&3
    cat $dir/$id >&3
    rm $dir/$id
done &
printf '\001ready 0 0\n' >&3
while read -r id command <&3; do
    # Left to the first process at once: a child that ends while this shell reads makes it forget
    # what it has read of a line.
    (
        {
            sh -c "$command" >$dir/$id 2>&1 </dev/null 3>&- 4>&-
            echo "$id $?" >&4
        } &
    )
done
