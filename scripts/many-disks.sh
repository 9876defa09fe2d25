#!/usr/bin/env bash
# DISKS disks on one daemon: a verified load on some while others come and go, kill -9, and starts. Prints what
# an idle disk costs, and what adding, removing and starting take.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
release_for_tests
export DISKS=${DISKS:-2048}
e2e_tests --only many_disks
