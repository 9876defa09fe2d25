#!/usr/bin/env bash
# Makes Debian packages: hearth, and hearth-dbgsym with what a debugger and a backtrace with line numbers need.
#
#   scripts/deb.sh [DIRECTORY]     into that directory [target/deb]
#
# HEARTH_BIN=FILE packages that binary instead of building one; VERSION= and COMPRESS= (of dpkg-deb -Z) are for tests.
# dpkg-deb is enough: there is nothing to configure, and the few maintainer scripts are in packaging/debian.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
# shellcheck source=scripts/stage.sh
. "$ROOT/scripts/stage.sh"

out=${1:-$(target_dir)/deb}
for tool in dpkg-deb dpkg-shlibdeps objcopy; do
    command -v "$tool" >/dev/null || die "making a Debian package needs $tool; install dpkg-dev and binutils"
done
hearth=${HEARTH_BIN:-}
if [[ -z $hearth ]]; then
    "$ROOT/scripts/build.sh"
    hearth=$(target_dir)/release/hearth
fi
version=$(package_version)
architecture=$(dpkg --print-architecture)
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
SOURCE_DATE_EPOCH=$(package_time)
export SOURCE_DATE_EPOCH

# What the tree holds gets a list of checksums, settings a list of their own, and the package its file.
pack() {
    local tree=$1 name=$2
    chmod -R u=rwX,go=rX "$tree"
    (cd "$tree" && find . -type f ! -path './DEBIAN/*' -printf '%P\0' | LC_ALL=C sort -z | xargs -0 md5sum) >"$tree/DEBIAN/md5sums"
    find "$tree" -newermt "@$SOURCE_DATE_EPOCH" -exec touch -hd "@$SOURCE_DATE_EPOCH" {} +
    dpkg-deb --root-owner-group -Z"${COMPRESS:-xz}" --build "$tree" "$out/${name}_${version}_$architecture.deb" >/dev/null
    note "$out/${name}_${version}_$architecture.deb"
}

# Libraries, with the versions whose symbols are used.
depends() {
    local tree=$1
    mkdir -p "$work/shlibs/debian"
    printf 'Source: hearth\n\nPackage: hearth\nArchitecture: any\n' >"$work/shlibs/debian/control"
    (cd "$work/shlibs" && dpkg-shlibdeps -O "$tree/usr/bin/hearth" 2>/dev/null) | sed -n 's/^shlibs:Depends=//p'
}

tree=$work/hearth
stage "$hearth" "$tree"
doc=$tree/usr/share/doc/hearth
install -m 644 "$ROOT/packaging/debian/copyright" "$doc/copyright"
{
    printf 'hearth (%s) unstable; urgency=medium\n\n' "$version"
    printf '  * What is new in this version: /usr/share/doc/hearth/CHANGES.md.gz\n\n'
    printf ' -- Hearth maintainers <maintainers@localhost>  %s\n' "$(LC_ALL=C date -uRd "@$SOURCE_DATE_EPOCH")"
} | gzip -9n >"$doc/changelog.gz"
gzip -9n <"$ROOT/CHANGELOG.md" >"$doc/CHANGES.md.gz"
install -D -m 644 "$ROOT/packaging/debian/lintian-overrides" "$tree/usr/share/lintian/overrides/hearth"
# A directory that is the administrator's is there before the settings are.
mkdir -p "$tree/DEBIAN"
(cd "$tree" && find etc -type f -printf '/%p\n' | LC_ALL=C sort) >"$tree/DEBIAN/conffiles"
install -m 644 "$ROOT/packaging/debian/triggers" "$tree/DEBIAN/triggers"
for script in postinst prerm postrm; do
    install -m 755 "$ROOT/packaging/debian/$script" "$tree/DEBIAN/$script"
done
cat >"$tree/DEBIAN/control" <<CONTROL
Package: hearth
Version: $version
Architecture: $architecture
Maintainer: Hearth maintainers <maintainers@localhost>
Installed-Size: $(du -sk --exclude=DEBIAN "$tree" | cut -f1)
Depends: $(depends "$tree"), systemd
Recommends: qemu-system-common, smartmontools
Section: admin
Priority: optional
Description: flash cache for disks of virtual machines
 Hearth puts the hot blocks of virtual disks on flash and keeps them there over
 restarts and crashes, while the disks themselves stay where they are: files,
 devices or servers. Hypervisors reach them over vhost-user, NBD or NFS.
CONTROL
pack "$tree" hearth

# What was taken out of the binary, where debuggers look for it.
id=$(readelf -n "$hearth" | sed -n 's/.*Build ID: //p')
[[ -n $id ]] || die "$hearth has no build ID; link it with -Wl,--build-id"
tree=$work/dbgsym
file=$tree/usr/lib/debug/.build-id/${id:0:2}/${id:2}.debug
install -d "$(dirname -- "$file")" "$tree/DEBIAN" "$tree/usr/share/doc"
if [[ -e $hearth.debug ]] && readelf -n "$hearth.debug" | grep "Build ID: $id" >/dev/null; then
    install -m 644 "$hearth.debug" "$file"
else
    objcopy --only-keep-debug --compress-debug-sections "$hearth" "$file"
fi
ln -s hearth "$tree/usr/share/doc/hearth-dbgsym"
cat >"$tree/DEBIAN/control" <<CONTROL
Package: hearth-dbgsym
Version: $version
Architecture: $architecture
Maintainer: Hearth maintainers <maintainers@localhost>
Installed-Size: $(du -sk "$tree" | cut -f1)
Depends: hearth (= $version)
Section: debug
Priority: optional
Auto-Built-Package: debug-symbols
Build-Ids: $id
Description: debug symbols for hearth
CONTROL
pack "$tree" hearth-dbgsym
