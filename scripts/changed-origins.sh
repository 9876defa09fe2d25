#!/usr/bin/env bash
# Changes origins while the daemon is stopped, RUNS times (default 100), with the binary that users run.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
release_for_tests
export RUNS=${RUNS:-100}
e2e_tests --only rolled_back
