#!/usr/bin/env bash
# All that takes too long for scripts/test.sh, one part after the other. Prints which passed, and notes in
# docs/lab.md on which commit each last did.
#
#   scripts/lab.sh               every part
#   scripts/lab.sh sim fuzz      only these
#   scripts/lab.sh --list        which there are
#
# A part that cannot run here (no root, no apt) is skipped and keeps its line. What passes with uncommitted
# changes is not noted: it says nothing of any commit. Ends with status 1 if a part failed.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
use_rust || die "no Rust 1.$RUST_MINOR_MIN or newer; run scripts/setup.sh"
cd "$ROOT"

SEEDS=${SEEDS:-100000}
CYCLES=${CYCLES:-60}
MINUTES=${MINUTES:-1}
PARTS=(sim fuzz released kill9 many-disks old-builds guest-lab nfs-lab storage-vm-lab remote-lab ceph-lab docs-lab package-lab)
PAGE=docs/lab.md

command_of() {
    case $1 in
        sim) echo "scripts/sim.sh $SEEDS" ;;
        fuzz) echo "scripts/fuzz.sh $MINUTES" ;;
        kill9) echo "env CYCLES=$CYCLES scripts/kill9.sh" ;;
        released | many-disks | old-builds | nfs-lab) echo "scripts/$1.sh" ;;
        guest-lab) echo "scripts/guest-lab.sh test" ;;
        storage-vm-lab | remote-lab | ceph-lab | docs-lab | package-lab | health-lab) echo "scripts/$1.sh" ;;
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

# Puts a line about a part in place of the one before: `| name | command | commit | day | seconds |`.
note_passed() {
    local part=$1 seconds=$2 commit line
    if [[ -n $(git status --porcelain --untracked-files=no -- ":!$PAGE") ]]; then
        note "not noted in $PAGE: there are uncommitted changes"
        return 0
    fi
    commit=$(git rev-parse --short=12 HEAD)
    line="| $part | \`$(command_of "$part")\` | $commit | $(date -u +%F) | $seconds |"
    awk -v part="$part" -v line="$line" '
        $0 ~ "^\\| " part " \\|" { print line; next }
        { print }
    ' "$PAGE" >"$PAGE.new"
    mv "$PAGE.new" "$PAGE"
}

if [[ ${1:-} == --list ]]; then
    printf '%s\n' "${PARTS[@]}"
    exit 0
fi
(($# == 0)) || PARTS=("$@")
for part in "${PARTS[@]}"; do
    command_of "$part" >/dev/null || die "there is no part $part; scripts/lab.sh --list names them"
done

outcome=()
failed=0
for part in "${PARTS[@]}"; do
    reason=$(why_not "$part")
    if [[ -n $reason ]]; then
        outcome+=("skipped: $reason")
        continue
    fi
    say "Lab: $part"
    if [[ $part == ceph-lab ]]; then scripts/setup.sh ceph; fi
    began=$SECONDS
    read -ra words <<<"$(command_of "$part")"
    if "${words[@]}"; then
        outcome+=("passed in $((SECONDS - began)) s")
        note_passed "$part" "$((SECONDS - began))"
    else
        outcome+=("FAILED after $((SECONDS - began)) s")
        failed=1
    fi
done

say "The lab on $(git rev-parse --short=12 HEAD)"
for i in "${!PARTS[@]}"; do note "$(printf '%-12s %s' "${PARTS[i]}" "${outcome[i]}")"; done
exit "$failed"
