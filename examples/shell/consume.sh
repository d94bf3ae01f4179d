#!/usr/bin/env bash
# Print the messages of a topic as one instance of a group, with nothing but redis-cli: consume.sh TOPIC GROUP [HOW_MANY]
# Without HOW_MANY it goes on for ever. Messages with line breaks need a client that does not print its replies as lines.
set -euo pipefail
[ $# -ge 2 ] || { echo "consume.sh: usage: consume.sh TOPIC GROUP [HOW_MANY]" >&2; exit 2; }
topic=$1 group=$2 left=${3:-9223372036854775807}
cli=${REDIS_CLI:-redis-cli}
tag="{${NAMESPACE:-duetime}:0}"
stream="$tag:stream:$topic" retry="$tag:retry:$topic:$group"

# Retries of this group have a stream of their own. An error here means that the group is registered already.
$cli XGROUP CREATE "$stream" "$group" '$' MKSTREAM >/dev/null 2>&1 || true
$cli XGROUP CREATE "$retry" "$group" 0 MKSTREAM >/dev/null 2>&1 || true
while [ "$left" -gt 0 ]; do # a reply may hold one more than is left
  mapfile -t reply < <($cli XREADGROUP GROUP "$group" "shell-$$" COUNT 1 BLOCK 1000 STREAMS "$stream" "$retry" '>' '>')
  # One entry of each stream that has one, all in pairs: the stream's key and the entry's id, then each field and its value.
  for ((at = 0; at < ${#reply[@]}; at += 2)); do
    case ${reply[at]} in
      "$stream" | "$retry") key=${reply[at]} entry=${reply[at + 1]} ;;
      message)
        printf '%s\n' "${reply[at + 1]}"
        $cli XACK "$key" "$group" "$entry" >/dev/null
        left=$((left - 1))
        ;;
    esac
  done
done
