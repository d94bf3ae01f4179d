#!/usr/bin/env bash
# Schedule a message with nothing but redis-cli: schedule.sh DELAY_SEC TOPIC MESSAGE
# REDIS_CLI is how to call it, such as "redis-cli -h 127.0.0.1 -p 6379" or "redis-cli -s /path/to/socket"; NAMESPACE is Duetime's.
set -euo pipefail
delay_sec=$1 topic=$2 message=$3
cli=${REDIS_CLI:-redis-cli}
tag="{${NAMESPACE:-duetime}:0}"

{ read -r seconds; read -r microseconds; } < <($cli TIME) # the server's clock is the one that counts
due_ms=$((seconds * 1000 + microseconds / 1000 + delay_sec * 1000))
start_ms=$((due_ms - due_ms % 600000))
id=$(od -An -N11 -tx1 /dev/urandom | tr -d ' \n') # 22 characters that no other message has
text=${message//\\/\\\\}
text=${text//\"/\\\"}
text=${text//$'\n'/\\n}
text=${text//$'\t'/\\t}
member="${id}j{\"topic\":\"$topic\",\"message\":\"$text\"}"
$cli --eval "$(dirname "$0")/../schedule.lua" "$tag:bucket:$start_ms" "$tag:buckets" , "$due_ms" "$start_ms" "$member" "$tag:wake" >/dev/null
echo "$id is due at $due_ms"
