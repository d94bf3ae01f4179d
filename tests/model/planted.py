"""Faults that somebody could write into the scripts or the store. The machine must find each, or the machine is at fault."""

from collections.abc import Callable
from dataclasses import dataclass

from pipeline.store import redis_store, schedule
from pipeline.store.redis_store import RedisStore
from tests.planting import load_again, read_module, replace_once

STORE = "store"  # the module that stores a transaction, as against its script
# Hundreds of examples pass before one finds these: 20 to 110 s each, so they wait for the night.
RARE = frozenset(
    {
        "two of one transaction are not compared",
        "a bucket's end belongs to it",
        "no marker: anybody gives back",
        "attempts of what is cancelled are kept",
        "the claim's key is not checked before",
        "attempts of what moved are kept",
        "attempts of what moved are not told",
        "a rescheduled replacement is none any more",
        "the greatest id wins, replacement or not",
    }
)


@dataclass(frozen=True)
class Planted:
    """A text of a script or of the store, and the faulty text in its place; the old one must be there exactly once.

    ``without`` is a text that goes, for a fault that moves something.
    """

    name: str
    where: str
    old: str
    new: str
    without: str = ""

    def over(self, read_script: Callable[[str], str]) -> Callable[[str], str]:
        """Return ``read_script`` with the fault planted, if it is one of a script."""
        return lambda name: self._plant(read_script(name)) if name == self.where else read_script(name)

    def store_type(self) -> type[RedisStore]:
        """Return the store, with the fault planted if it is one of the store."""
        if self.where != STORE:
            return RedisStore
        loaded = load_again(redis_store, read_module(redis_store))
        loaded.schedule = load_again(schedule, self._plant(read_module(schedule))).schedule  # type: ignore[attr-defined]
        return loaded.RedisStore  # type: ignore[no-any-return]

    def _plant(self, source: str) -> str:
        if self.without:
            source = replace_once(source, self.without, "", self.name)
        return replace_once(source, self.old, self.new, self.name)


PLANTED = [
    # schedule, the store's half
    Planted("the markers are not watched", STORE, 'frame_command("WATCH", *marker_keys)', 'frame_command("UNWATCH")'),
    Planted(
        "only the first marker is watched",
        STORE,
        'frame_command("WATCH", *marker_keys)',
        'frame_command("WATCH", marker_keys[0])',
    ),
    Planted(
        "all markers of the source are watched",
        STORE,
        'frame_command("WATCH", *marker_keys)',
        'frame_command("WATCH", *marker_keys, keys.markers(source_id))',
    ),
    Planted(
        "the markers are not compared", STORE, "if markers != [move.before for move in transaction.moves]:", "if False:"
    ),
    Planted(
        "only the first marker is compared",
        STORE,
        "if markers != [move.before for move in transaction.moves]:",
        "if markers[0] != transaction.moves[0].before:",
    ),
    Planted(
        "a refused writer goes on watching",
        STORE,
        'connection.send_command("UNWATCH")',
        'connection.send_command("PING")',
    ),
    Planted(
        "a transaction that was overtaken counts as done",
        STORE,
        "if replies is None:",
        "if not replies:\n        return []\n    if False:",
    ),
    Planted(
        "only the first bucket is stored",
        STORE,
        "[*framed[0].commands,",
        "[*framed[0].commands[:1],",
    ),
    Planted(
        "buckets count, not messages",
        STORE,
        "stored = len(transaction.rows) + len(transaction.cold) + len(identified)\n    names",
        "stored = len(framed[0].commands) + len(identified)\n    names",
    ),
    Planted("messages with an id have a place and no bucket", STORE, ", *framed[1].commands]", "]"),
    Planted("two of one transaction are not compared", STORE, "= repeated(all_identified)", "= []"),
    Planted(
        "an idempotency key is not remembered",
        STORE,
        "frame_places(hot_identified, keys.places())",
        'frame_command("PING")',
    ),
    Planted(
        "a place says another time",
        STORE,
        "frame_places(hot_identified,",
        "frame_places(MessageRows([ms + 1 for ms in identified.due_ms], identified.members, identified.idempotency_keys),",
    ),
    Planted(
        "a duplicate counts as stored",
        STORE,
        "+ len(identified)\n    names",
        "+ len(transaction.identified)\n    names",
    ),
    # schedule, the script's half
    Planted(
        "the markers are not moved",
        "schedule",
        "redis.call('SET', KEYS[FIRST_MARKER + move], ARGV[FIRST_MOVE + 2 * move + 1])",
        "",
    ),
    Planted("only the first marker is moved", "schedule", "for move = 0, move_count - 1 do", "for move = 0, 0 do"),
    Planted(
        "the marker of another file is moved",
        "schedule",
        "'SET', KEYS[FIRST_MARKER + move]",
        "'SET', KEYS[FIRST_MARKER + move_count - 1 - move]",
    ),
    Planted(
        "the markers are not indexed",
        "schedule",
        "redis.call('ZADD', markers, text(now_ms), ARGV[FIRST_MOVE + 2 * move])",
        "",
    ),
    Planted("an idempotency key is not looked up", "check_ids", "if waiting[index] or", "if"),
    Planted("the key of what was delivered is not looked up", "check_ids", "is_remembered(delivered_until)", "false"),
    Planted("the key of what was cancelled is not looked up", "check_ids", "is_remembered(gone_until)", "false"),
    Planted("a key is known beyond its time", "check_ids", "now_ms < tonumber(forget_ms)", "true"),
    Planted(
        "what is known is stored all the same", "check_ids", "if is_right and #known == 0 then", "if is_right then"
    ),
    Planted(
        "buckets are not set aside",
        "check_ids",
        "first + count - 1 do\n    if redis.call",
        "first do\n    if redis.call",
    ),
    Planted(
        "places are not set aside",
        "check_ids",
        "for index = first, first + count - 1 do\n    if redis.call",
        "for index = first + 1, first + count - 1 do\n    if redis.call",
    ),
    Planted(
        "a refused transaction moves its markers", "schedule", "written) then\n  return {}\nend", "written) then\nend"
    ),
    Planted(
        "buckets are not indexed",
        "schedule",
        "redis.call('ZADD', buckets, ARGV[first_start + bucket], ARGV[first_start + bucket])",
        "",
    ),
    Planted("rejected lines are not counted", "schedule", ", 'rejected'})", "})"),
    Planted(
        "the bell is never rung",
        "schedule",
        "redis.call('PUBLISH', wake_channel, text(tonumber(head[2])))",
        "",
    ),
    Planted(
        "the bell is rung for whatever is stored",
        "schedule",
        "if head[1] == first_member or head[1] == first_identified then",
        "if true then",
    ),
    Planted(
        "the bell is rung for the first of any bucket",
        "schedule",
        "if ARGV[first_start + bucket] == oldest then",
        "if true then",
    ),
    Planted(
        "the bell is not rung for a message with an id",
        "schedule",
        " or head[1] == first_identified",
        "",
    ),
    # claim
    Planted("a claim has no lease", "claim", "redis.call('ZADD', claims, lease_until_ms, lease_token)", ""),
    Planted("a claim is only popped", "claim", "redis.call('RPUSH', claim, unpack(", "tostring((unpack)("),
    Planted(
        "the oldest bucket is a cursor",
        "claim",
        "oldest ~= bucket_start_ms then",
        "oldest + 0 > bucket_start_ms + 0 then",
    ),
    Planted("a claim is a millisecond early", "claim", "set, '-inf', text(now_ms),", "set, '-inf', text(now_ms + 1),"),
    Planted("a claim begins at the newest", "claim", "'BYSCORE', 'LIMIT', first,", "'BYSCORE', 'REV', 'LIMIT', first,"),
    Planted("the limit is not kept", "claim", "math.min(PAGE, limit)", "PAGE"),
    Planted("asking again claims again", "claim", "if held_until then", "if false then"),
    Planted(
        "a bucket leaves the index with its first claim", "claim", "if redis.call('EXISTS', bucket) == 0", "if true"
    ),
    Planted("an empty bucket stays in the index", "claim", "if redis.call('EXISTS', bucket) == 0", "if false"),
    Planted(
        "the last lease is told, not the first", "claim", "claims, 0, 0, 'WITHSCORES'", "claims, -1, -1, 'WITHSCORES'"
    ),
    Planted("attempts are not told", "claim", "if rows and is_tried then", "if false then"),
    Planted(
        "a claim takes before it puts",
        "claim",
        "redis.call('LLEN', claim)\n",
        "redis.call('ZREMRANGEBYRANK', bucket, 0, count - 1)\n",
        "if count > 0 then\n  redis.call('ZREMRANGEBYRANK', bucket, 0, count - 1)\nend\n",
    ),
    # claim, of a message in a wrong bucket
    Planted(
        "what is in a wrong bucket keeps all others waiting",
        "claim",
        "  if is_misfiled() then",
        "  if false then",
    ),
    Planted(
        "a bucket's end belongs to it",
        "claim",
        "head_ms >= tonumber(bucket_start_ms) + BUCKET_WIDTH_MS",
        "head_ms > tonumber(bucket_start_ms) + BUCKET_WIDTH_MS",
    ),
    Planted("it goes into a bucket that is not indexed", "claim", "redis.call('ZADD', buckets, start, start)", ""),
    Planted("it stays there, too", "claim", "redis.call('ZREMRANGEBYRANK', bucket, 0, #found / 2 - 1)", ""),
    Planted("it is not counted", "claim", "redis.call('HINCRBY', counters, 'misfiled', #found / 2)", ""),
    # ack
    Planted("no marker: an expired lease will do", "ack", " or lease_until_ms <= now_ms", ""),
    Planted("no marker: the token alone will do", "ack", " or tonumber(held_until_ms) ~= lease_until_ms", ""),
    Planted("a lease holds at its end", "ack", "lease_until_ms <= now_ms", "lease_until_ms < now_ms"),
    Planted("times are compared as texts", "ack", "lease_until_ms <= now_ms", "ARGV[2] <= ARGV[6]"),
    Planted(
        "no tombstone: a delivered id is forgotten",
        "ack",
        "ARGV[at], text(now_ms + id_retention_ms))",
        "ARGV[at], 0)",
    ),
    Planted(
        "another message with its id loses it",
        "ack",
        "== message_id then\n    redis.call('HDEL', places, id)",
        "then\n    redis.call('HDEL', places, id)",
    ),
    Planted("ids are forgotten early", "ack", "'-inf', text(now_ms)", "'-inf', '(inf'"),
    Planted("attempts are kept for ever", "ack", "redis.call('HDEL', attempts,", "tostring("),
    Planted("a part is taken for the whole", "ack", "if delivered == claimed then", "if true then"),
    Planted("saying it twice counts twice", "ack", "local count = delivered - before", "local count = delivered"),
    Planted("one too few is forgotten", "ack", "'LTRIM', claim, 2 * count, -1", "'LTRIM', claim, 2 * count - 2, -1"),
    Planted("one too many is forgotten", "ack", "'LTRIM', claim, 2 * count, -1", "'LTRIM', claim, 2 * count + 2, -1"),
    Planted("a claim that is over keeps its lease", "ack", "redis.call('ZREM', claims, lease_token)", ""),
    # release
    Planted("a lease goes on at its end", "release", "held_until_ms > now_ms", "held_until_ms >= now_ms"),
    Planted(
        "no marker: anybody gives back",
        "release",
        "local lost = held_until_ms ~= lease_until_ms",
        "local lost = not held_until_ms",
    ),
    Planted(
        "attempts count only at the acknowledgement",
        "release",
        "if by_finder or (index + 1) / 2 <= unacknowledged then",
        "if false then",
    ),
    Planted(
        "an attempt that was never started counts",
        "release",
        "if by_finder or (index + 1) / 2 <= unacknowledged then",
        "if true then",
    ),
    Planted("given back into a closed bucket", "release", "redis.call('ZADD', buckets, start, start)", ""),
    Planted(
        "all is given back into one bucket", "release", "'bucket:' .. start,", "'bucket:' .. (last_start or start),"
    ),
    Planted("given back and still claimed", "release", "redis.call('UNLINK', claim)", ""),
    Planted("given back with its lease", "release", "redis.call('ZREM', claims, lease_token)", ""),
    Planted(
        "giving back takes before it puts",
        "release",
        "for index = 1, #rows, 2 do",
        "redis.call('UNLINK', claim)\nfor index = 1, #rows, 2 do",
        "redis.call('UNLINK', claim)",
    ),
    # by_id
    Planted(
        "a cancelled message stays",
        "by_id",
        "  remove(set, member, score, held_topic, buckets)\n  redis.call('HDEL', attempts",
        "  redis.call('HDEL', attempts",
    ),
    Planted("a cancelled key may come again", "by_id", "redis.call('ZADD', cancelled, 'GT', forget_ms, name)", ""),
    Planted("a cancelled key keeps its place", "by_id", "redis.call('HDEL', places, name)\n  remove(", "remove("),
    Planted("attempts of what is cancelled are kept", "by_id", "redis.call('HDEL', attempts, message_id)", ""),
    Planted(
        "a cancellation is not counted",
        "by_id",
        "redis.call('HDEL', attempts, message_id)\n  redis.call('HINCRBY', counters, 'cancelled', 1)",
        "redis.call('HDEL', attempts, message_id)",
    ),
    Planted(
        "a bucket that is emptied stays indexed", "by_id", "redis.call('ZREM', buckets, bucket_start(", "tostring(("
    ),
    Planted(
        "a bucket is not indexed for what comes",
        "by_id",
        "  redis.call('ZADD', buckets, start, start)\n  remove(",
        "  remove(",
    ),
    Planted(
        "a rescheduled key keeps its old place",
        "by_id",
        "redis.call('HSET', places, name, place_of(new_member,",
        "tostring(name .. place_of(new_member,",
    ),
    Planted(
        "a rescheduled message stays where it was too",
        "by_id",
        "start, start)\n  remove(",
        "start, start)\n  tostring(",
    ),
    Planted("a rescheduled message wakes nobody", "by_id", "redis.call('PUBLISH', wake_channel, due_ms)", ""),
    Planted("a handle leads to what has a key", "by_id", "(is_handle and key)", "false"),
    Planted("ids are compared the other way round", "by_id", "return byte < other_byte", "return byte > other_byte"),
    Planted("the search begins behind the first", "by_id", "'-inf', '(' .. score)", "'-inf', '(0')"),
    Planted(
        "the member found is taken without a look",
        "by_id",
        "member and string.sub(member, 1, MESSAGE_ID_LENGTH) == message_id and member",
        "member",
    ),
    Planted("what is in flight is cancelled", "by_id", "status = 'IN_FLIGHT'", "status = 'CANCELLED'"),
    Planted(
        "a key is cancelled in any case, unless it is unknown",
        "by_id",
        "  if in_any_case then\n    remember_cancelled()",
        "  if in_any_case and status ~= 'UNKNOWN' then\n    remember_cancelled()",
    ),
    Planted(
        "a key is cancelled in any case, unless it is in flight",
        "by_id",
        "  if in_any_case then\n    remember_cancelled()",
        "  if in_any_case and not is_in_flight then\n    remember_cancelled()",
    ),
    Planted("an unknown key is always cancelled", "by_id", "  if in_any_case then\n", "  if verb == 'cancel' then\n"),
    Planted(
        "to cancel again forgets sooner",
        "by_id",
        "redis.call('ZADD', cancelled, 'GT', ",
        "redis.call('ZADD', cancelled, ",
    ),
    Planted(
        "what was delivered counts as cancelled",
        "by_id",
        "elseif is_remembered(ids, name, now_ms) then",
        "elseif false then",
    ),
    Planted(
        "a rescheduled replacement is none any more",
        "by_id",
        "place_of(new_member, new_due_ms, nil, is_of_replacement(place))",
        "place_of(new_member, new_due_ms)",
    ),
    # replace
    Planted("what is replaced stays", "replace", "  remove(set, member, score, held_topic, buckets)\n", ""),
    Planted(
        "what is replaced is taken out, and nothing comes",
        "replace",
        "redis.call('ZADD', new_bucket, new_due_ms, new_member)",
        "",
    ),
    Planted("the bucket of a replacement is not indexed", "replace", "redis.call('ZADD', buckets, start, start)\n", ""),
    Planted(
        "a replacement has no place", "replace", "redis.call('HSET', places, name, place_of(", "tostring(place_of("
    ),
    Planted(
        "a replacement is not known as one",
        "replace",
        "place_of(new_member, new_due_ms, nil, true)",
        "place_of(new_member, new_due_ms)",
    ),
    Planted("attempts of what is replaced are kept", "replace", "  redis.call('HDEL', attempts, message_id)\n", ""),
    Planted("the first with its key is not counted", "replace", "redis.call('HINCRBY', counters, 'stored', 1)", ""),
    Planted(
        "a replacement counts as one more", "replace", "else\n  redis.call('HINCRBY'", "end\ndo\n  redis.call('HINCRBY'"
    ),
    Planted("the last replacement wins", "replace", "is_before(new_id, message_id)", "false"),
    Planted("the smallest id wins", "replace", "is_before(new_id, message_id)", "is_before(message_id, new_id)"),
    Planted("the first replacement wins", "replace", "is_before(new_id, message_id)", "true"),
    Planted(
        "ids are compared the other way round when they replace",
        "replace",
        "return byte < other_byte",
        "return byte > other_byte",
    ),
    Planted(
        "the greatest id wins, replacement or not", "replace", "(is_of_replacement(place) and is_before(", "(is_before("
    ),
    Planted("to replace again undoes a move", "replace", "new_id == message_id or ", ""),
    Planted(
        "a cancelled key is replaced",
        "replace",
        "not lifts_cancellation and is_remembered(cancelled,",
        "false and is_remembered(cancelled,",
    ),
    Planted(
        "a cancellation is never lifted",
        "replace",
        "not lifts_cancellation and is_remembered(cancelled,",
        "is_remembered(cancelled,",
    ),
    Planted("a cancellation that is lifted is remembered", "replace", "redis.call('ZREM', cancelled, name)", ""),
    Planted("a cancellation is always lifted", "replace", "if lifts_cancellation then", "if true then"),
    Planted("a delivered key is replaced", "replace", "is_remembered(ids, name, now_ms)", "false"),
    Planted("what is in flight is replaced", "replace", "    return {'IN_FLIGHT', '', ''}\n", ""),
    Planted("a replacement wakes nobody", "replace", "redis.call('PUBLISH', wake_channel, due_ms)", ""),
]

# What only the machine with topics can find.
PLANTED_IN_STREAMS = [
    Planted("all goes to the screen", "claim", "elseif not step.kind and settings.kind then", "elseif false then"),
    Planted("a moved message stays in its bucket", "claim", "bucket, 0, count - 1)", "bucket, 0, #rows / 2 - 1)"),
    Planted("a moved message is not counted", "claim", "{delivered = delivered, dead = dead}", "{dead = dead}"),
    Planted("dead letters are not indexed", "claim", "redis.call('SADD', dead_topics, step.name)", ""),
    Planted("a dead letter is not counted", "claim", "{delivered = delivered, dead = dead}", "{delivered = delivered}"),
    Planted("nothing is checked before it is written", "claim", "if not checked[step.key] then", "if false then"),
    Planted("the claim's key is not checked before", "claim", "redis.call('LLEN', claim)\n", ""),
    Planted(
        "a moved id is forgotten at once",
        "claim",
        "MESSAGE_ID_LENGTH), text(now_ms + id_retention_ms)",
        "MESSAGE_ID_LENGTH), text(now_ms)",
    ),
    Planted(
        "another message with its id loses it to what moved",
        "claim",
        "== message_id then\n    redis.call('HDEL', places, id)",
        "then\n    redis.call('HDEL', places, id)",
    ),
    Planted("a moved id is in flight for ever", "claim", "leave_places(places, ids, body.id,", "tostring(body.id .."),
    Planted(
        "a pause leaves the place behind",
        "claim",
        "note_place(places, step.body.id, step.member, step.score, step.name)",
        "",
    ),
    Planted(
        "what was held leaves its place behind when it is claimed",
        "claim",
        "note_place(places, step.body.id, step.member, step.score)",
        "",
    ),
    Planted("a held message is rescheduled and stays", "by_id", "or set ~= new_bucket then", "then"),
    Planted(
        "a held message is replaced and stays",
        "replace",
        "redis.call('ZREM', set, member)",
        "redis.call('ZREM', held_topic == '' and set or new_bucket, member)",
    ),
    Planted(
        "what a pause holds, or a rate limit, is no replacement any more",
        "claim",
        "place_of(member, score, held_topic, is_of_replacement(place))",
        "place_of(member, score, held_topic)",
    ),
    Planted(
        "what was held is no replacement any more when it is given back",
        "claim",
        "place_of(member, score, held_topic, is_of_replacement(place))",
        "place_of(member, score, held_topic, held_topic and is_of_replacement(place))",
    ),
    Planted("ids are never cleaned up", "claim", "if has_ids then", "if false then"),
    Planted("attempts of what moved are kept", "claim", "redis.call('HDEL', attempts,", "tostring("),
    Planted("attempts of what moved are not told", "claim", "(is_tried and text(tries_before(member) + 1))", "nil"),
    Planted("a pause is overlooked", "claim", "redis.call('HEXISTS', pauses, topic) == 1", "false"),
    Planted("a pause counts for all topics", "claim", "redis.call('HEXISTS', pauses, topic) == 1", "true"),
    Planted("nothing expires", "claim", "settings.expire_ms > 0 and", "false and"),
    Planted("it expires a millisecond early", "claim", "> settings.expire_ms then", ">= settings.expire_ms then"),
    Planted(
        "an expired message is delivered",
        "claim",
        "step.kind, step.name, step.reason = 'dead', topic, 'expired'",
        "step.kind, step.name = 'stream', topic",
    ),
    Planted("a rate limit is overlooked", "claim", "is_limited = settings.interval_ms > 0", "is_limited = false"),
    Planted(
        "a rate limit lets no burst through", "claim", "BURST_MS, BACKLOG_MS = 100, 1000", "BURST_MS, BACKLOG_MS = 0, 0"
    ),
    Planted(
        "a rate limit is forgotten between claims",
        "claim",
        "redis.call('HSET', rate_limits, topic,",
        "tostring(topic ..",
    ),
    Planted(
        "a time in which nothing goes earns all that it would have taken",
        "claim",
        "math.max(noted_ms, now_ms - reserve_ms)",
        "noted_ms",
    ),
    Planted("a limit that is raised counts later", "claim", ", now_ms + interval_ms)", ", 9e15)"),
    Planted("what comes due overtakes what is held", "claim", "(not held_topic and waits(topic)) or", "false or"),
    Planted(
        "what is held goes with the first of it", "claim", "if not step or step.kind == 'held' then", "if not step then"
    ),
    Planted("what was held stays", "claim", "redis.call('ZREM', turn.key, step.member)", ""),
    Planted(
        "a handle does not lead to what is held", "by_id", "is_handle and not member and place_elsewhere()", "false"
    ),
    Planted("what is held is not indexed", "claim", "redis.call('ZADD', held_topics,", "tostring(held_topics,"),
    Planted(
        "what a clock that was set back made early is delivered",
        "claim",
        "due_page(turn.key, held, limit,",
        "redis.call('ZRANGE', turn.key, held, held + limit - 1,",
    ),
    Planted("a queue takes all of a claim", "claim", "math.ceil(claim_limit / 2)", "claim_limit"),
    Planted(
        "a queue is seen to before a bucket that keeps others waiting", "claim", " and not is_misfiled() then", " then"
    ),
    Planted("nothing goes with the last that was held", "claim", "      is_held[topic] = false --", "      --"),
    Planted("a wait does not end when something held may go", "claim", "turn_ms or TIME_MAX", "TIME_MAX"),
    Planted("topics are not indexed", "claim", "redis.call('SADD', topics,", "tostring(PAGE,"),
    Planted(
        "a target that is not given is taken for the screen",
        "claim",
        "if not step or not step.kind then",
        "if not step or not is_given[step.key] then",
    ),
    Planted(
        "what has no target is passed over", "claim", "      is_cut = true\n      break\n", "      is_cut = true\n"
    ),
    Planted("looking ahead uses up a rate limit", "claim", "local ahead_ms = {}", "local ahead_ms = go_ms"),
    Planted("the settings of a topic are overlooked", "claim", "own.sink or of_all.sink", "of_all.sink"),
    Planted("a webhook is overlooked", "claim", "kind = has_webhook and 'stream' or ", "kind = "),
    Planted(
        "the webhook of all topics is that of each",
        "claim",
        "(own.webhook or of_all.webhook or '')",
        "(of_all.webhook or '')",
    ),
    Planted(
        "settings are those of the first topic",
        "claim",
        "of_topic[topic] = settings",
        "of_topic = setmetatable({}, {__index = function() return settings end})",
    ),
    Planted("each topic has an outbox of its own", "claim", "kind == 'outbox' and 'kafka' or topic", "topic"),
    Planted("a topic of the outbox is listed", "claim", "if step.kind ~= 'outbox' and checked", "if checked"),
    # resume
    Planted("what is paused goes", "resume", "or redis.call('HEXISTS', pauses, topic) == 1", ""),
    Planted("a pause never ends", "resume", "redis.call('HDEL', pauses, topic)", ""),
    Planted("what was paused stays held", "resume", "redis.call('ZADD', held_topics, 0, topic)", ""),
    Planted("the end of a pause rings no bell", "resume", "redis.call('PUBLISH', wake_channel, '0')", ""),
]
