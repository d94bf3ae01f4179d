#!/usr/bin/env bash
# Schedule a message with nothing but redis-cli: schedule.sh DELAY_SEC TOPIC MESSAGE
# REDIS_CLI is how to call it, such as "redis-cli -h 127.0.0.1 -p 6379" or "redis-cli -s /path/to/socket"; NAMESPACE is Duetime's.
set -euo pipefail
export LC_ALL=C
fail() { echo "schedule.sh: $2" >&2; exit "$1"; }

[ $# -eq 3 ] || fail 2 "usage: schedule.sh DELAY_SEC TOPIC MESSAGE, such as: schedule.sh 1.5 mail 'tea is ready'"
delay_sec=$1 topic=$2 message=$3
cli=${REDIS_CLI:-redis-cli}
tag="{${NAMESPACE:-duetime}:0}"

[[ $delay_sec =~ ^([0-9]{1,8})(\.([0-9]{1,3}))?$ ]] || fail 2 "DELAY_SEC is a number of seconds such as 5 or 1.5, not $delay_sec"
fraction=${BASH_REMATCH[3]}000
delay_ms=$((10#${BASH_REMATCH[1]} * 1000 + 10#${fraction:0:3}))
[[ $topic =~ ^[A-Za-z0-9._-]{1,64}$ ]] || fail 2 "TOPIC has 1 to 64 of A-Z a-z 0-9 . _ -, and is $topic"
[ -n "$message" ] || fail 2 "MESSAGE is empty"
text=${message//\\/\\\\}
text=${text//\"/\\\"}
text=${text//$'\n'/\\n}
text=${text//$'\r'/\\r}
text=${text//$'\t'/\\t}
[[ ! $text =~ [[:cntrl:]] ]] || fail 2 "MESSAGE has a control character that this script does not write"

time=$($cli TIME) || fail 1 "Redis does not answer" # the server's clock is the one that counts
{ read -r seconds; read -r microseconds; } <<<"$time" || fail 1 "Redis does not say its time: $time"
[[ $seconds$microseconds =~ ^[0-9]+$ ]] || fail 1 "Redis does not say its time: $time"
due_ms=$((seconds * 1000 + 10#$microseconds / 1000 + delay_ms))
start_ms=$((due_ms - due_ms % 600000))
id=$(od -An -N11 -tx1 /dev/urandom | tr -d ' \n') # 22 characters that no other message has
member="${id}j{\"topic\":\"$topic\",\"message\":\"$text\"}"
# redis-cli says nothing by its exit code when the server refuses.
reply=$($cli --eval "$(dirname "$0")/../schedule.lua" "$tag:bucket:$start_ms" "$tag:buckets" , "$due_ms" "$start_ms" "$member" "$tag:wake") \
  || fail 1 "Redis does not answer; the message may be scheduled"
[ "$reply" = 1 ] || fail 1 "the message is not scheduled: $reply"
echo "$id is due at $due_ms"
