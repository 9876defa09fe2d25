#!/usr/bin/env bash
# Runs what takes too long for the gate, one part after the other, and records each result in
# docs/internals/lab-status.md.
#
#   scripts/lab.sh               all parts
#   scripts/lab.sh --resume      all parts that have not passed on this code
#   scripts/lab.sh sim fuzz      these parts
#   scripts/lab.sh --list        the names of the parts
#
# A part that fails does not stop the others; the exit status is 1 if any failed. A part that cannot run here (no
# root, no apt) is skipped and keeps its row. Nothing is recorded while there are uncommitted changes: the result
# would belong to no commit. Code is the same if only documents differ.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
use_rust || die "no Rust 1.$RUST_MINOR_MIN or newer; run scripts/setup.sh"
cd "$ROOT"

SEEDS=${SEEDS:-100000}
CYCLES=${CYCLES:-60}
MINUTES=${MINUTES:-1}
# Each day's simulation runs other seeds, so that repeated runs search further. The row records the first seed.
SEED_START=${SEED_START:-$(($(date -u +%s) / 86400 * SEEDS))}
PARTS=(lints sim seeds fuzz released kill9 changed-origins many-disks old-builds guest-lab nfs-lab storage-vm-lab remote-lab ceph-lab docs-lab package-lab health-lab)
PAGE=docs/internals/lab-status.md

command_of() {
    case $1 in
        sim) echo "scripts/sim.sh $SEEDS $SEED_START" ;;
        fuzz) echo "scripts/fuzz.sh $MINUTES" ;;
        kill9) echo "env CYCLES=$CYCLES scripts/kill9.sh" ;;
        changed-origins) echo "env RUNS=100 scripts/changed-origins.sh" ;;
        guest-lab) echo "scripts/guest-lab.sh test" ;;
        lints | seeds | released | many-disks | old-builds | nfs-lab | storage-vm-lab | remote-lab | ceph-lab | docs-lab | package-lab | health-lab)
            echo "scripts/$1.sh"
            ;;
        *) return 1 ;;
    esac
}

# Prints why a part cannot run here, if it cannot.
why_not() {
    case $1 in
        storage-vm-lab | remote-lab | ceph-lab | docs-lab | package-lab | health-lab)
            if ((EUID != 0)); then
                echo "it needs root"
            elif ! command -v apt-get >/dev/null; then
                echo "it needs Debian's packages"
            fi
            ;;
        guest-lab | nfs-lab) command -v qemu-system-x86_64 >/dev/null || echo "it needs qemu-system-x86_64" ;;
    esac
}

# True if the part passed on a commit whose code is that of HEAD.
has_passed() {
    local commit
    commit=$(awk -F ' *[|] *' -v part="$1" '$2 == part && $4 == "passed" { print $5 }' "$PAGE")
    [[ -n $commit ]] && git diff --quiet "$commit" HEAD -- . ':!docs' ':!*.md' 2>/dev/null
}

# Replaces a part's row: `| part | command | result | commit | date | seconds |`.
record() {
    local part=$1 result=$2 seconds=$3 line
    if [[ -n $(git status --porcelain --untracked-files=no -- ":!$PAGE") ]]; then
        note "not recorded in $PAGE: there are uncommitted changes"
        return 0
    fi
    line="| $part | \`$(command_of "$part")\` | $result | $(git rev-parse --short=12 HEAD) | $(date -u +%F) | $seconds |"
    awk -v part="$part" -v line="$line" '$0 ~ "^\\| " part " \\|" { print line; next } { print }' "$PAGE" >"$PAGE.new"
    mv "$PAGE.new" "$PAGE"
}

resume=
case ${1:-} in
    --list)
        printf '%s\n' "${PARTS[@]}"
        exit 0
        ;;
    --resume)
        resume=1
        shift
        ;;
esac
(($# == 0)) || PARTS=("$@")
for part in "${PARTS[@]}"; do
    command_of "$part" >/dev/null || die "there is no part $part; scripts/lab.sh --list prints the names"
done

outcome=()
failed=0
for part in "${PARTS[@]}"; do
    if [[ -n $resume ]] && has_passed "$part"; then
        outcome+=("passed earlier on this code")
        continue
    fi
    reason=$(why_not "$part")
    if [[ -n $reason ]]; then
        outcome+=("skipped: $reason")
        continue
    fi
    say "Lab: $part"
    if [[ $part == ceph-lab ]]; then scripts/setup.sh ceph; fi
    began=$SECONDS
    read -ra words <<<"$(command_of "$part")"
    result=passed
    "${words[@]}" </dev/null || result=failed
    outcome+=("$result in $((SECONDS - began)) s")
    record "$part" "$result" "$((SECONDS - began))"
    [[ $result == passed ]] || failed=1
done

say "The lab on $(git rev-parse --short=12 HEAD)"
for i in "${!PARTS[@]}"; do note "$(printf '%-14s %s' "${PARTS[i]}" "${outcome[i]}")"; done
exit "$failed"
