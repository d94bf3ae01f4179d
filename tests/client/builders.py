"""What stands in for the drain loop."""

from pipeline.config import ALL_TOPICS, TopicSettings
from pipeline.store.keys import Keys
from pipeline.store.redis_store import RedisStore
from tests.servers import RealServer
from tests.store.builders import set_topic

KEYS = Keys("duetime")


def deliver_due(server: RealServer) -> None:
    """Deliver what is due into the streams of its topics."""
    with server.client() as client:
        set_topic(client, KEYS, ALL_TOPICS, TopicSettings(sink="stream"))
        store = RedisStore(client, KEYS)
        while store.claim("test").moved:
            pass
