#!/bin/sh
# Installs what lies beside this script: install.sh [DIRECTORY, / if none is given].
# Settings that are there stay as they are.
set -eu
here=$(cd -- "$(dirname -- "$0")" && pwd)
to=${1:-}
cp -R --preserve=mode "$here/usr" "${to:-/}"
cd "$here"
find etc -type f | while read -r file; do
    if [ -e "$to/$file" ]; then
        cmp -s "$file" "$to/$file" || cp "$file" "$to/$file.new"
    else
        mkdir -p "$to/${file%/*}"
        cp "$file" "$to/$file"
    fi
done
if [ -z "$to" ]; then
    systemd-sysusers hearth.conf
    systemd-tmpfiles --create hearth.conf
    systemctl daemon-reload
fi
echo "hearth is installed; /usr/share/doc/hearth/install.md says how to go on"
