#!/usr/bin/env bash
# Install what is needed if need be, then measure: bench/run.sh [ingest|peers|...|all|profile|report] [--quick]; --help says more.
set -eu
. "$(dirname "${BASH_SOURCE[0]}")/../spark-submit.sh"
cd "$root"
become_python requirements-test.lock -m bench "$@"
