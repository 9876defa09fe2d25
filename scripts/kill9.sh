#!/usr/bin/env bash
# kill -9 of the real daemon under a verified write load, CYCLES times, in every cache mode, and while
# disks are added and removed, at least 1000 times; and while legs of a mirror are copied to, scrubbed and replaced, and while
# flash devices are added, taken out and replaced.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
release_for_tests
export CYCLES=${CYCLES:-300}
export CHANGES=${CHANGES:-1000}
e2e_tests --only kill9 registry mirrors several_flash
