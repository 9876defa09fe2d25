#!/usr/bin/env bash
# Makes a tarball for distributions other than Debian's: a static binary with its unit, man pages and settings, and an
# RPM spec that packages just that.
#
#   scripts/dist.sh [DIRECTORY]     into that directory [target/dist]
#
# The binary is linked statically, against musl if this toolchain has that target (rustup target add
# x86_64-unknown-linux-musl, and musl-gcc), else against the C library that is here.
# HEARTH_BIN=FILE packages that binary instead of building one.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
# shellcheck source=scripts/stage.sh
. "$ROOT/scripts/stage.sh"

out=${1:-$(target_dir)/dist}
machine=$(uname -m)
hearth=${HEARTH_BIN:-}
if [[ -z $hearth ]]; then
    use_rust || die "no Rust 1.$RUST_MINOR_MIN or newer; run scripts/setup.sh"
    target=$machine-unknown-linux-gnu
    if [[ -d $(rustc --print sysroot)/lib/rustlib/$machine-unknown-linux-musl/lib ]] && command -v musl-gcc >/dev/null; then
        target=$machine-unknown-linux-musl
    else
        note "no musl target here: linking statically against $(ldd --version | head -1 | sed 's/.*) //; s/^/glibc /')"
    fi
    # With --target the flag is for the program only, not for what runs while it is built.
    (cd "$ROOT" && RUSTFLAGS="-C target-feature=+crt-static" cargo build --release --locked -p hearth --target "$target")
    hearth=$(target_dir)/$target/release/hearth
    if readelf -d "$hearth" | grep NEEDED; then die "$hearth still needs shared libraries"; fi
fi
# What RPM allows in a version: no minus.
version=$(package_version)
name=hearth-$version
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tree=$work/$name
stage "$hearth" "$tree"
install -m 644 "$ROOT/CHANGELOG.md" "$tree/"
install -m 755 "$ROOT/packaging/install.sh" "$tree/install.sh"
sed "s/@VERSION@/$version/" "$ROOT/packaging/rpm/hearth.spec" >"$tree/hearth.spec"
mkdir -p "$out"
tar -C "$work" --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$(package_time)" -cf - "$name" |
    gzip -9n >"$out/$name-$machine.tar.gz"
note "$out/$name-$machine.tar.gz; an RPM of it: rpmbuild -tb $out/$name-$machine.tar.gz"
