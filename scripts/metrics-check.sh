#!/usr/bin/env bash
# Has Prometheus' own tool judge what Hearth gives it: the rules and their tests, and the page of a daemon.
# promtool is taken from the path, or out of Debian's package without installing it.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
cd "$ROOT"

promtool=$(command -v promtool || true)
if [[ -z $promtool ]]; then
    kept="$(target_dir)/promtool"
    if [[ ! -x $kept && -z ${HEARTH_NO_INSTALL:-} ]]; then
        work=$(mktemp -d)
        if (cd "$work" && apt-get -qq download prometheus && dpkg-deb -x prometheus_*.deb .) >/dev/null 2>&1; then
            mkdir -p "$(dirname -- "$kept")"
            mv "$work/usr/bin/promtool" "$kept"
        fi
        rm -rf "$work"
    fi
    if [[ ! -x $kept ]]; then
        note "SKIPPED: no promtool, and no package to take it from; rules and metrics are not judged"
        exit 0
    fi
    promtool=$kept
fi

cd packaging/prometheus
"$promtool" check rules hearth.rules.yml hearth.alerts.yml
"$promtool" test rules hearth.tests.yml
cd "$ROOT"

hearth=${HEARTH_BIN:-$(target_dir)/release/hearth}
[[ -x $hearth ]] || die "no $hearth; build it, or set HEARTH_BIN"
dir=$(mktemp -d)
daemon=
trap '[[ -z $daemon ]] || kill "$daemon"; wait; rm -rf "$dir"' EXIT
"$hearth" pool create --flash "$dir/flash" --size 64M >/dev/null
truncate -s 16M "$dir/origin"
"$hearth" serve --flash "$dir/flash" --run-dir "$dir/run" --state-dir "$dir/state" 2>"$dir/log" &
daemon=$!
for _ in {1..300}; do
    if "$hearth" --run-dir "$dir/run" pool show >/dev/null 2>&1; then break; fi
    sleep 0.1
done
"$hearth" --run-dir "$dir/run" disk add vm1 --origin "$dir/origin" >/dev/null
"$hearth" --run-dir "$dir/run" metrics >"$dir/page"
"$promtool" check metrics <"$dir/page"
say "promtool has nothing against the rules and $(grep -vc '^#' "$dir/page") series"
