# What every package installs, in one tree. Sourced, never run; needs scripts/lib.sh.
#
# Debian's package, the tarball and what an RPM is made of are this tree: where files go is said here only.

# The version of what is packaged: that of the workspace if HEAD has its tag, else one that sorts before it, and after
# those of older commits.
package_version() {
    local version
    version=$(sed -nE 's/^version = "(.*)"/\1/p' "$ROOT/Cargo.toml" | head -1)
    if [[ -n ${VERSION:-} ]]; then
        version=$VERSION
    elif [[ $(git -C "$ROOT" tag --points-at HEAD 2>/dev/null) != *"v$version"* ]]; then
        version+="~git$(TZ=UTC git -C "$ROOT" log -1 --date=format-local:%Y%m%d%H%M%S --format=%cd.%h)"
    fi
    printf '%s' "$version"
}

# The time all packaged files have, so that the same commit gives the same package.
package_time() { printf '%s' "${SOURCE_DATE_EPOCH:-$(git -C "$ROOT" log -1 --format=%ct)}"; }

# Installs binary $1 and all that belongs to it below $2.
stage() {
    local hearth=$1 tree=$2 page
    local from=$ROOT/packaging share=$tree/usr/share
    rm -rf "$tree"
    install -D -m 755 "$hearth" "$tree/usr/bin/hearth"
    # Function names stay: the backtrace of a panic is read by people.
    objcopy --strip-debug "$tree/usr/bin/hearth"

    "$hearth" generate "$tree/made"
    install -d "$share/man/man1"
    for page in "$tree"/made/*.1; do
        gzip -9n <"$page" >"$share/man/man1/${page##*/}.gz"
    done
    install -D -m 644 "$tree/made/hearth.bash" "$share/bash-completion/completions/hearth"
    install -D -m 644 "$tree/made/_hearth" "$share/zsh/vendor-completions/_hearth"
    install -D -m 644 "$tree/made/hearth.fish" "$share/fish/vendor_completions.d/hearth.fish"
    rm -rf "$tree/made"

    install -D -m 644 "$from/systemd/hearth.service" "$tree/usr/lib/systemd/system/hearth.service"
    install -D -m 644 "$from/systemd/hearth-swap.service" "$tree/usr/lib/systemd/system/hearth-swap.service"
    install -D -m 644 "$from/systemd/hearth-memory.service" "$tree/usr/lib/systemd/system/hearth-memory.service"
    # The second service, in a binary that has it.
    if "$hearth" monitor --help >/dev/null 2>&1; then
        for page in hearth-monitor.service hearth-monitor-failed.service hearth-probe.socket hearth-probe@.service; do
            install -D -m 644 "$from/systemd/$page" "$tree/usr/lib/systemd/system/$page"
        done
        install -D -m 755 "$from/probe" "$tree/usr/lib/hearth/probe"
    fi
    install -D -m 644 "$from/sysusers.conf" "$tree/usr/lib/sysusers.d/hearth.conf"
    install -D -m 644 "$from/tmpfiles.conf" "$tree/usr/lib/tmpfiles.d/hearth.conf"
    install -D -m 644 "$from/hearth.toml" "$tree/etc/hearth/hearth.toml"
    install -D -m 644 "$from/apparmor-guests" "$tree/etc/apparmor.d/abstractions/hearth-guests"
    install -D -m 644 "$from/needrestart.conf" "$tree/etc/needrestart/conf.d/hearth.conf"
    install -d "$share/hearth" "$share/doc/hearth"
    cp -R "$from/prometheus" "$from/grafana" "$share/hearth/"
    install -m 644 "$ROOT/README.md" "$ROOT"/docs/*.md "$share/doc/hearth/"
    chmod -R u=rwX,go=rX "$tree"
}
