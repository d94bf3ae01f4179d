#!/usr/bin/env bash
# Run a job, or with no arguments everything on this machine; --help says more.
#
# The first start installs what is needed into .venv. Each later one only compares two files and becomes Python, so
# signals sent to this process reach the job. Works with the bash 3.2 of macOS; tests/run.sh shares the functions.
set -eu
unset CDPATH

# The checkout: where this file is, once every symbolic link to it is followed.
self="${BASH_SOURCE[0]}"
while [ -L "$self" ]; do
  link="$(readlink "$self")"
  case "$link" in
    /*) self="$link" ;;
    *) self="$(dirname "$self")/$link" ;;
  esac
done
root="$(cd -P "$(dirname "$self")" && pwd)"

# A Python that the locked packages are built for. Each candidate is run, as a name on PATH may be a stub that fails.
find_python() {
  local name
  for name in python3 python3.14 python3.13 python3.12 python3.11; do
    if "$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' >/dev/null 2>&1; then
      command -v "$name"
      return
    fi
  done
  echo "Duetime needs Python 3.11 to 3.14 on PATH: install one of them, then start again." >&2
  return 2
}

# become_python LOCK ARGUMENT...: turn into .venv's Python, after bringing .venv up to date with LOCK if it isn't.
# -P keeps modules that lie in the user's current directory from shadowing ours.
become_python() {
  local lock="$1" python
  shift
  export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
  if [ -x "$root/.venv/bin/python" ] && [ -f "$root/.venv/installed/$lock" ] &&
    [ "$(<"$root/.venv/installed/$lock")" = "$(<"$root/$lock")" ]; then
    exec "$root/.venv/bin/python" -P "$@"
  fi
  python="$(find_python)" || exit
  exec "$python" "$root/pipeline/runtime/bootstrap.py" "$lock" "$@"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  become_python requirements.lock -m pipeline.runtime.submit "$@"
fi
