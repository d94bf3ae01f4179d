#!/usr/bin/env bash
# Install the test requirements if need be, then run pytest in the checkout's root: tests/run.sh [pytest options]
set -eu
. "$(dirname "${BASH_SOURCE[0]}")/../spark-submit.sh"
cd "$root"
become_python requirements-test.lock -m pipeline.runtime.run_tests "$@"
