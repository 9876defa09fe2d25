#!/usr/bin/env bash
# Has Prometheus judge what Hearth gives it: promtool the rules, their tests and the page of a daemon; and the server itself
# scrapes that daemon, with the rules loaded. Both are taken from the path, or out of Debian's package without installing it.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
cd "$ROOT"

promtool=$(command -v promtool || true)
prometheus=$(command -v prometheus || true)
if [[ -z $promtool || -z $prometheus ]]; then
    kept="$(target_dir)/prometheus"
    if [[ ! -x $kept/prometheus && -z ${HEARTH_NO_INSTALL:-} ]]; then
        work=$(mktemp -d)
        if (cd "$work" && apt-get -qq download prometheus && dpkg-deb -x prometheus_*.deb .) >/dev/null 2>&1; then
            mkdir -p "$kept"
            mv "$work/usr/bin/promtool" "$work/usr/bin/prometheus" "$kept/"
        fi
        rm -rf "$work"
    fi
    if [[ ! -x $kept/prometheus ]]; then
        note "SKIPPED: no Prometheus, and no package to take it from; rules and metrics are not judged"
        exit 0
    fi
    promtool=$kept/promtool
    prometheus=$kept/prometheus
fi

cd packaging/prometheus
"$promtool" check rules hearth.rules.yml hearth.alerts.yml
"$promtool" test rules hearth.tests.yml
cd "$ROOT"

hearth=${HEARTH_BIN:-$(target_dir)/release/hearth}
[[ -x $hearth ]] || die "no $hearth; build it, or set HEARTH_BIN"
dir=$(mktemp -d)
started=()
trap '((${#started[@]} == 0)) || kill "${started[@]}"; wait; rm -rf "$dir"' EXIT
"$hearth" pool create --flash "$dir/flash" --size 64M >/dev/null
truncate -s 16M "$dir/origin"
"$hearth" serve --flash "$dir/flash" --run-dir "$dir/run" --state-dir "$dir/state" 2>"$dir/log" &
started+=($!)
for _ in {1..300}; do
    if "$hearth" --run-dir "$dir/run" pool show >/dev/null 2>&1; then break; fi
    sleep 0.1
done
"$hearth" --run-dir "$dir/run" disk add vm1 --origin "$dir/origin" >/dev/null
"$hearth" --run-dir "$dir/run" metrics >"$dir/page"
"$promtool" check metrics <"$dir/page"

# The server's own view: what it keeps of a scrape, and what the rules make of it.
"$hearth" --run-dir "$dir/run" metrics --listen 127.0.0.1:0 2>"$dir/listen" &
started+=($!)
until [[ -s $dir/listen ]]; do sleep 0.1; done
target=$(sed -n 's#.*http://\([0-9.:]*\)/metrics.*#\1#p' "$dir/listen")
# Free when asked for, and hardly taken by another at once.
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
cat >"$dir/prometheus.yml" <<YML
global: {scrape_interval: 1s, evaluation_interval: 1s}
rule_files: ["$ROOT/packaging/prometheus/hearth.rules.yml", "$ROOT/packaging/prometheus/hearth.alerts.yml"]
scrape_configs:
  - job_name: hearth
    static_configs: [{targets: ["$target"]}]
YML
"$prometheus" --config.file="$dir/prometheus.yml" --storage.tsdb.path="$dir/tsdb" --web.listen-address="127.0.0.1:$port" \
    --log.level=warn 2>"$dir/prometheus.log" &
started+=($!)
# The scrape came, health is in it, and a histogram is read as one.
for question in 'up{job="hearth"} == 1' 'hearth_disk_up{disk="vm1"} == 1' 'hearth_health{kind="daemon"} == 0' \
    'count(hearth_disk_request_duration_seconds_bucket{disk="vm1", le="+Inf"}) > 0'; do
    answer=
    for _ in {1..600}; do
        answer=$("$promtool" query instant "http://127.0.0.1:$port" "$question" 2>/dev/null || true)
        [[ -z $answer ]] || break
        sleep 0.2
    done
    [[ -n $answer ]] || { cat "$dir/prometheus.log"; die "Prometheus has no answer to $question"; }
done
python3 - "http://127.0.0.1:$port/api/v1/rules" <<'PY' || die "Prometheus does not take the rules"
import json, sys, urllib.request
groups = json.load(urllib.request.urlopen(sys.argv[1]))["data"]["groups"]
rules = [rule for group in groups for rule in group["rules"]]
wrong = [rule for rule in rules if rule["health"] == "err"]
assert len(rules) > 10 and not wrong, (len(rules), wrong)
PY
# The board asks Prometheus for nothing that it does not understand, and for nothing that nobody tells.
python3 - "http://127.0.0.1:$port/api/v1/query?" "$target" "$dir/page" <<'PY' || die "a panel of the board shows nothing"
import json, re, sys, urllib.parse, urllib.request
server, instance, page = sys.argv[1:]
known = set(re.findall(r"^(hearth_\w+)", open(page).read(), re.M))
known |= set(re.findall(r"record: (\S+)", open("packaging/prometheus/hearth.rules.yml").read()))
def questions(part):
    if isinstance(part, dict):
        yield from [part["expr"]] if "expr" in part else []
        part = list(part.values())
    for inner in part if isinstance(part, list) else []:
        yield from questions(inner)
asked = list(questions(json.load(open("packaging/grafana/hearth.json"))))
assert len(asked) > 10, asked
for text in asked:
    text = text.replace("$instance", instance).replace("$disk", ".*")
    unknown = [name for name in re.findall(r"[a-z_:]*hearth_[a-z0-9_:]+", text) if name not in known]
    assert not unknown, (unknown, text)
    answer = json.load(urllib.request.urlopen(server + urllib.parse.urlencode({"query": text})))
    assert answer["status"] == "success", (answer, text)
PY
say "promtool has nothing against the rules, and Prometheus keeps $(grep -vc '^#' "$dir/page") series"
