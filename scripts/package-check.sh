#!/usr/bin/env bash
# Is what a package would install right? Without installing it, and without building anything: the binary is
# HEARTH_BIN, or that of the last release build. scripts/package-lab.sh installs it in a guest.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
cd "$ROOT"

hearth=${HEARTH_BIN:-$(target_dir)/release/hearth}
[[ -x $hearth ]] || die "no $hearth; build it, or set HEARTH_BIN"
if ! command -v dpkg-deb >/dev/null || ! command -v dpkg-shlibdeps >/dev/null; then
    note "SKIPPED: no dpkg-deb and dpkg-shlibdeps; Debian packages are not looked at"
    exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Fails unless the text on standard input has line $1.
has() { grep -E -- "$1" >/dev/null || die "no “$1” in $2"; }

HEARTH_BIN=$hearth VERSION=0.0.1 COMPRESS=none scripts/deb.sh "$work/deb" >/dev/null
deb=$(echo "$work"/deb/hearth_0.0.1_*.deb)
symbols=$(echo "$work"/deb/hearth-dbgsym_0.0.1_*.deb)

dpkg-deb -c "$deb" >"$work/list"
for file in usr/bin/hearth usr/lib/systemd/system/hearth.service usr/lib/sysusers.d/hearth.conf \
    usr/lib/tmpfiles.d/hearth.conf etc/hearth/hearth.toml etc/apparmor.d/abstractions/hearth-guests \
    etc/needrestart/conf.d/hearth.conf usr/share/man/man1/hearth.1.gz usr/share/man/man1/hearth-disk-add.1.gz \
    usr/share/bash-completion/completions/hearth usr/share/zsh/vendor-completions/_hearth \
    usr/share/fish/vendor_completions.d/hearth.fish usr/share/doc/hearth/copyright \
    usr/share/doc/hearth/install.md usr/share/hearth/prometheus/hearth.alerts.yml usr/lib/hearth/probe \
    usr/lib/systemd/system/hearth-monitor-failed.service usr/lib/systemd/system/hearth-probe.socket \
    usr/lib/systemd/system/hearth-probe@.service usr/lib/systemd/system/hearth-memory.service; do
    has " \./$file\$" "$deb" <"$work/list"
done
# All of it is root's, and nothing may be written by others.
if grep -vE '^[-dl][rwx-]{4}[-][rx-]{2}[-][rx-] root/root|^l' "$work/list"; then die "these are not as they should be"; fi
# A pool, or what must outlive it, is in no package: dpkg would take it away.
if grep -E ' \./(var|run|srv)/' "$work/list"; then die "the package holds what is not its own"; fi

dpkg-deb -I "$deb" >"$work/info"
has '^ Depends: .*libc6 \(>= ' "$deb" <"$work/info"
# What it needs is in Debian 12 and in Ubuntu 24.04, which has a newer C library: the older of the two counts, and no library
# whose package is called otherwise in one of them (Ubuntu 24.04 has some with t64 behind their names).
glibc_most=2.36
for needed in $(sed -n 's/^ Depends: //p' "$work/info" | sed 's/([^)]*)//g; s/[, ][, ]*/ /g'); do
    case $needed in
        libc6 | libgcc-s1 | systemd) ;;
        *) die "the package needs $needed, which has to be in Debian 12 and in Ubuntu 24.04 under that name; see there and name it here" ;;
    esac
done
dpkg-deb --ctrl-tarfile "$deb" | tar -xOf - ./conffiles | has '^/etc/hearth/hearth.toml$' "its list of settings"
dpkg-deb -x "$deb" "$work/tree"
for script in postinst prerm postrm; do
    dpkg-deb --ctrl-tarfile "$deb" | tar -xOf - "./$script" >"$work/$script"
    sh -n "$work/$script"
    if grep -nE 'rm -r|/var/lib/hearth/|restart hearth(\.service)?( |$)' <(grep -v '^ *\(#\|echo\)' "$work/$script"); then
        die "$script would take something away or restart the daemon"
    fi
done

# Symbols of the C library: dpkg-shlibdeps believes this machine's, which may be newer than those it is for.
glibc=$(objdump -T "$work/tree/usr/bin/hearth" | grep -oE 'GLIBC_[0-9.]+' | sed 's/GLIBC_//' | sort -uV | tail -1)
[[ -n $glibc && $(printf '%s\n' "$glibc" "$glibc_most" | sort -V | tail -1) == "$glibc_most" ]] ||
    die "the binary needs symbols of glibc ${glibc:-(none found)}, and Debian 12 has $glibc_most; build it on Debian 12"
note "needs glibc $glibc; Debian 12 has 2.36, Ubuntu 24.04 2.39"

# The binary runs, without what debuggers need; that is in the other package, under the same name.
bin=$work/tree/usr/bin/hearth
"$bin" --version >/dev/null
if readelf -SW "$bin" | grep -E '\.debug_(info|line|str)' >/dev/null; then die "the packaged binary has debug sections"; fi
id=$(readelf -n "$bin" | sed -n 's/.*Build ID: //p')
dpkg-deb -c "$symbols" | has "/usr/lib/debug/.build-id/${id:0:2}/${id:2}.debug\$" "$symbols"

# The groups they name are made by the package's script, which has not run.
sed -E 's/^(control|monitor)-group = .*/\1-group = "root"/' "$work/tree/etc/hearth/hearth.toml" >"$work/hearth.toml"
"$bin" config check "$work/hearth.toml" >/dev/null || die "the settings it installs are not right"
bash -n "$work/tree/usr/share/bash-completion/completions/hearth"
if command -v man >/dev/null; then
    # groff says what it does not understand.
    if LC_ALL=C.UTF-8 MANROFFSEQ='' man --warnings=mac -l "$work/tree/usr/share/man/man1/hearth-serve.1.gz" 2>&1 >/dev/null | grep .; then
        die "the manual page is not well formed"
    fi
fi

# Hardened as far as the unit says; 30 is 3.0.
if command -v systemd-analyze >/dev/null; then
    for unit in "$work"/tree/usr/lib/systemd/system/*.service; do
        systemd-analyze security --offline=true --threshold=30 "$unit" >"$work/security" ||
            { cat "$work/security"; die "${unit##*/} is more exposed than 3.0"; }
        note "$(tail -1 "$work/security" | sed 's/^→ //')"
        # Programs that it names need not be installed here.
        sed "s#=/usr/bin/hearth#=$bin#; s#=/usr/lib/hearth/#=$work/tree/usr/lib/hearth/#; /^Documentation=/d" "$unit" >"$work/${unit##*/}"
        systemd-analyze verify --man=no --recursive-errors=no "$work/${unit##*/}"
    done
fi
# A second time gives the same file.
HEARTH_BIN=$hearth VERSION=0.0.1 COMPRESS=none scripts/deb.sh "$work/again" >/dev/null
cmp "$deb" "$work/again/${deb##*/}" || die "the same commit gives different packages"

HEARTH_BIN=$hearth VERSION=0.0.1 scripts/dist.sh "$work/dist" >/dev/null
mkdir "$work/host"
tar -C "$work" -xzf "$work"/dist/hearth-0.0.1-*.tar.gz
"$work/hearth-0.0.1/install.sh" "$work/host" >/dev/null
echo '# mine' >>"$work/host/etc/hearth/hearth.toml"
"$work/hearth-0.0.1/install.sh" "$work/host" >/dev/null
tail -1 "$work/host/etc/hearth/hearth.toml" | has '^# mine$' "the settings after a second installation"
"$work/host/usr/bin/hearth" --version >/dev/null
# What the spec in it makes of it, on a machine that can.
if command -v rpmbuild >/dev/null; then
    rpmbuild --define "_topdir $work/rpm" --define '_binary_payload w1.gzdio' -tb "$work"/dist/hearth-0.0.1-*.tar.gz >"$work/rpm.log" 2>&1 ||
        { tail -20 "$work/rpm.log"; die "no RPM can be made of the tarball"; }
    rpm=$(echo "$work"/rpm/RPMS/*/hearth-0.0.1-1.*.rpm)
    rpm -qpl "$rpm" >"$work/rpm.list"
    for file in usr/bin/hearth usr/lib/hearth/probe usr/lib/systemd/system/hearth.service usr/share/man/man1/hearth.1.gz \
        usr/share/zsh/site-functions/_hearth; do
        has "^/$file\$" "$rpm" <"$work/rpm.list"
    done
    rpm -qpc "$rpm" | has '^/etc/hearth/hearth.toml$' "its list of settings"
else
    note "SKIPPED: no rpmbuild; the RPM spec is not tried"
fi
say "the package is as it should be: $(du -k "$deb" | cut -f1) KiB unpacked, debug symbols apart"
