#!/usr/bin/env bash
# Real clients meet what users run: the end-to-end tests, and what a package would install, with the program as `make build` makes
# it. The gate runs the same with that of its one build, which is optimised less and checks more.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
release_for_tests
scripts/package-check.sh
export CYCLES=${CYCLES:-5}
exec scripts/run-tests.py --jobs 3 --below tests/e2e --locked -p hearth-e2e
