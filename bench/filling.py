"""Messages put straight into a server, as any client may do it (docs/wire-format.md), and shown to the loops when we choose."""

from collections.abc import Iterable

from bench.raw import Pair, fill_buffers, pack_zadds, send_buffers
from bench.server import Server
from bench.workload import ARRIVAL_MS, message_text
from pipeline.config import RedisSettings
from pipeline.core.buckets import BUCKET_WIDTH_MS
from pipeline.core.clock import SystemClock
from pipeline.core.ids import encode_token, message_id
from pipeline.core.messages import Message
from pipeline.store.keys import Keys

KEYS = Keys(RedisSettings().namespace)
HIDDEN = Keys("hidden")


def make_pairs(due_ms: Iterable[int], generation: int = 0) -> list[Pair]:
    """Return (due_ms, member) for due times in order; message 0, 1, 2, … have ids that rise.

    Args:
        generation: gives other ids.
    """
    token = encode_token(ARRIVAL_MS, generation)
    return [(due, Message(due, message_text(n)).to_member(message_id(token, n))) for n, due in enumerate(due_ms)]


def overdue_pairs(count: int) -> list[Pair]:
    """Return messages that are all due, spread over the last hour."""
    now_ms = SystemClock().wall_ms()
    width_ms = 6 * BUCKET_WIDTH_MS
    return make_pairs(now_ms - width_ms + n * width_ms // count for n in range(count))


def store_pairs(server: Server, pairs: list[Pair], keys: Keys = KEYS) -> None:
    """Store pairs that are sorted by due time, and let the server finish what that makes it do."""
    send_buffers(server.socket, fill_buffers(pack_zadds(pairs, keys)))
    server.wait_for_rewrite()


def reveal(server: Server) -> None:
    """Give what is stored under ``HIDDEN`` to the loops, all in one moment, and ring."""
    starts = [int(start) for start in server.client.zrange(HIDDEN.buckets(), 0, -1)]
    pipeline = server.client.pipeline(transaction=True)
    for start_ms in starts:
        pipeline.rename(HIDDEN.bucket(start_ms), KEYS.bucket(start_ms))
    pipeline.rename(HIDDEN.buckets(), KEYS.buckets())
    pipeline.publish(KEYS.wake(), starts[0])
    pipeline.execute()
