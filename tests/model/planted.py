"""Faults that somebody could write into the scripts or the store. The machine must find each, or the machine is at fault."""

from collections.abc import Callable
from dataclasses import dataclass

from pipeline.store import redis_store, schedule
from pipeline.store.redis_store import RedisStore
from tests.planting import load_again, read_module, replace_once

STORE = "store"  # the module that stores a transaction, as against its script


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
    Planted("the fences are not watched", STORE, 'frame_command("WATCH", *fence_keys)', 'frame_command("UNWATCH")'),
    Planted(
        "only the first fence is watched",
        STORE,
        'frame_command("WATCH", *fence_keys)',
        'frame_command("WATCH", fence_keys[0])',
    ),
    Planted(
        "all fences of the source are watched",
        STORE,
        'frame_command("WATCH", *fence_keys)',
        'frame_command("WATCH", *fence_keys, keys.fences(source_id))',
    ),
    Planted(
        "the fences are not compared", STORE, "if fences != [move.before for move in transaction.moves]:", "if False:"
    ),
    Planted(
        "only the first fence is compared",
        STORE,
        "if fences != [move.before for move in transaction.moves]:",
        "if fences[0] != transaction.moves[0].before:",
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
        "if not replies:\n        return Scheduled(0, 0)\n    if False:",
    ),
    Planted(
        "only the first bucket is stored",
        STORE,
        "for group in transaction.groups)",
        "for group in transaction.groups[:1])",
    ),
    Planted("buckets count, not messages", STORE, "sum(group.count for group in groups)", "len(groups)"),
    Planted("all messages with an id go to one bucket", STORE, "(number[message.bucket_start_ms],", "(1,"),
    # schedule, the script's half
    Planted(
        "the fences are not moved",
        "schedule",
        "redis.call('SET', KEYS[FIRST_FENCE + move], ARGV[FIRST_MOVE + 2 * move + 1])",
        "",
    ),
    Planted("only the first fence is moved", "schedule", "for move = 0, move_count - 1 do", "for move = 0, 0 do"),
    Planted(
        "the fence of another file is moved",
        "schedule",
        "'SET', KEYS[FIRST_FENCE + move]",
        "'SET', KEYS[FIRST_FENCE + move_count - 1 - move]",
    ),
    Planted(
        "the fences are not indexed", "schedule", "redis.call('ZADD', fences, now_ms, ARGV[FIRST_MOVE + 2 * move])", ""
    ),
    Planted("a caller's id is not looked up", "schedule", "'NX', '+inf', caller_id) == 1", "'+inf', caller_id) < 2"),
    Planted(
        "a caller's id is not remembered",
        "schedule",
        "redis.call('ZADD', ids, 'NX', '+inf', caller_id) == 1",
        "not redis.call('ZSCORE', ids, caller_id)",
    ),
    Planted("what is known counts as stored", "schedule", "known = known + 1", "stored = stored + 1"),
    Planted(
        "buckets are not indexed",
        "schedule",
        "> 0 then\n    redis.call('ZADD', buckets,",
        "< 0 then\n    redis.call('ZADD', buckets,",
    ),
    Planted(
        "a bucket of known ids alone is indexed",
        "schedule",
        "> 0 then\n    redis.call('ZADD', buckets,",
        ">= 0 then\n    redis.call('ZADD', buckets,",
    ),
    Planted("rejected lines are not counted", "schedule", ", rejected = rejected}", "}"),
    Planted(
        "the bell is never rung",
        "schedule",
        "redis.call('PUBLISH', wake_channel, string.format('%.0f', first_due_ms))",
        "",
    ),
    Planted(
        "the bell is rung for whatever is stored",
        "schedule",
        "if firsts[redis.call('ZRANGE', KEYS[first_bucket + bucket], 0, 0)[1]] then",
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
        "firsts[member] = due_ms == first_due_ms or nil",
        "",
    ),
    # claim
    Planted("a claim has no lease", "claim", "redis.call('ZADD', claims, lease_until_ms, lease_token)", ""),
    Planted("a claim is only popped", "claim", "redis.call('RPUSH', claim, unpack(", "tostring((unpack)("),
    Planted(
        "the oldest bucket is a cursor", "claim", "if oldest ~= bucket_start_ms", "if oldest + 0 > bucket_start_ms + 0"
    ),
    Planted(
        "a claim is a millisecond early", "claim", "bucket, '-inf', text(now_ms),", "bucket, '-inf', text(now_ms + 1),"
    ),
    Planted("a claim begins at the newest", "claim", "'BYSCORE',\n", "'BYSCORE', 'REV',\n"),
    Planted("the limit is not kept", "claim", "math.min(PAGE, claim_limit - count)", "PAGE"),
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
        "redis.call('ZREMRANGEBYRANK', bucket, 0, count - 1) -- the lowest scores are the lowest ranks",
    ),
    # ack
    Planted("no fence: an expired lease will do", "ack", " or lease_until_ms <= now_ms", ""),
    Planted("no fence: the token alone will do", "ack", " or tonumber(held_until_ms) ~= lease_until_ms", ""),
    Planted("a lease holds at its end", "ack", "lease_until_ms <= now_ms", "lease_until_ms < now_ms"),
    Planted("times are compared as texts", "ack", "lease_until_ms <= now_ms", "ARGV[2] <= ARGV[6]"),
    Planted(
        "no tombstone: a delivered id is forgotten",
        "ack",
        "ids, 'XX', string.format('%.0f', now_ms + id_memory_ms),",
        "ids, 'XX', 0,",
    ),
    Planted("ids are forgotten early", "ack", "'-inf', string.format('%.0f', now_ms)", "'-inf', '(inf'"),
    Planted("attempts are kept for ever", "ack", "redis.call('HDEL', attempts,", "tostring("),
    Planted("a part is taken for the whole", "ack", "if delivered == claimed then", "if true then"),
    Planted("saying it twice counts twice", "ack", "local count = delivered - before", "local count = delivered"),
    Planted("one too few is forgotten", "ack", "'LTRIM', claim, 2 * count, -1", "'LTRIM', claim, 2 * count - 2, -1"),
    Planted("one too many is forgotten", "ack", "'LTRIM', claim, 2 * count, -1", "'LTRIM', claim, 2 * count + 2, -1"),
    Planted("a claim that is over keeps its lease", "ack", "redis.call('ZREM', claims, lease_token)", ""),
    # release
    Planted("a lease goes on at its end", "release", "held_until_ms > now_ms", "held_until_ms >= now_ms"),
    Planted(
        "no fence: anybody gives back",
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
        "an attempt that was never begun counts",
        "release",
        "if by_finder or (index + 1) / 2 <= unacknowledged then",
        "if true then",
    ),
    Planted(
        "given back into a closed bucket",
        "release",
        "redis.call('ZADD', buckets, bucket_start_ms, bucket_start_ms)",
        "",
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
]

# What only the machine with topics can find.
PLANTED_IN_STREAMS = [
    Planted("all goes to the screen", "claim", "if not step.key and not route.streams then", "if true then"),
    Planted("a moved message stays in its bucket", "claim", "bucket, 0, count - 1)", "bucket, 0, #rows / 2 - 1)"),
    Planted("a moved message is not counted", "claim", "{delivered = delivered, dead = dead}", "{dead = dead}"),
    Planted("a dead letter is not counted", "claim", "{delivered = delivered, dead = dead}", "{delivered = delivered}"),
    Planted("nothing is checked before it is written", "claim", "if not checked[step.key] then", "if false then"),
    Planted("the claim's key is not checked before", "claim", "redis.call('LLEN', claim)\n", ""),
    Planted("a moved id is forgotten at once", "claim", "'XX', text(now_ms + id_memory_ms)", "'XX', text(now_ms)"),
    Planted("a moved id is remembered for ever", "claim", "redis.call('ZADD', ids, 'XX',", "tostring('XX' .."),
    Planted("ids are never cleaned up", "claim", "if has_ids then", "if false then"),
    Planted("attempts of what moved are kept", "claim", "redis.call('HDEL', attempts,", "tostring("),
    Planted("attempts of what moved are not told", "claim", "(is_tried and text(tries_before(member) + 1))", "nil"),
    Planted("a pause is overlooked", "claim", "redis.call('HEXISTS', pauses, body.topic) == 1", "false"),
    Planted("a pause counts for all topics", "claim", "redis.call('HEXISTS', pauses, body.topic) == 1", "true"),
    Planted("nothing expires", "claim", "route.expire_ms > 0 and", "false and"),
    Planted("it expires a millisecond early", "claim", "> route.expire_ms then", ">= route.expire_ms then"),
    Planted(
        "an expired message is delivered, too",
        "claim",
        "step.key, step.is_dead = route.dead, true",
        "step.is_dead = true",
    ),
    Planted("a pace is overlooked", "claim", "if go_ms > now_ms + BURST_MS then", "if false then"),
    Planted("a pace lets no burst through", "claim", "if go_ms > now_ms + BURST_MS then", "if go_ms > now_ms then"),
    Planted("a pace is forgotten between claims", "claim", "redis.call('HSET', paces, topic,", "tostring(topic .."),
    Planted(
        "what waits for its pace loses its due time",
        "claim",
        "headers = body.headers, due_ms = step.due_ms}",
        "headers = body.headers, due_ms = step.score}",
    ),
    Planted(
        "what waits for its pace waits again",
        "claim",
        "route.interval_ms > 0 and not body.due_ms then",
        "route.interval_ms > 0 then",
    ),
    Planted("a later bucket is not indexed", "claim", "redis.call('ZADD', buckets, step.start, step.start)", ""),
    Planted(
        "what waits for its pace is a copy",
        "claim",
        "string.sub(member, 1, MESSAGE_ID_LENGTH) .. 'r' ..",
        "'1' .. string.sub(member, 2, MESSAGE_ID_LENGTH) .. 'r' ..",
    ),
    Planted("topics are not indexed", "claim", "redis.call('SADD', topics, body.topic)", "true"),
    Planted(
        "a route that is missing is taken for the screen's",
        "claim",
        "    need, detail = 'ROUTE', name\n    return false",
        "    show(member, due_ms)\n    return true",
    ),
    # resume
    Planted("what is paused is put back", "resume", "redis.call('HEXISTS', pauses, topic) == 1", "false"),
    Planted(
        "what is put back is not indexed", "resume", "redis.call('ZADD', buckets, bucket_start_ms, bucket_start_ms)", ""
    ),
    Planted("what is put back is lost", "resume", "redis.call('ZADD', bucket, rows[index + 1], rows[index])", ""),
    Planted("what is put back rings no bell", "resume", "redis.call('PUBLISH', wake_channel, bucket_start_ms)", ""),
    Planted("all is put back into one bucket", "resume", "tonumber(bucket_start_ms) + BUCKET_WIDTH_MS - 1", "9e15"),
]
