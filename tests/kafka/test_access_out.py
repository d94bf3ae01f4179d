"""What a loop that writes has to be granted: a broker with passwords and ACLs, and the rights of docs/kafka.md."""

import uuid
from collections.abc import Iterable

import pytest
from confluent_kafka.admin import AclBinding, AclOperation, AclPermissionType, ResourcePatternType, ResourceType

from pipeline.core.errors import ConfigError
from pipeline.kafka.cluster import KafkaAway
from pipeline.kafka.sender import KafkaSender
from pipeline.store.outbox import OutboxEntry
from tests.kafka.test_access import Guarded, properties_of
from tests.kafka.test_access import guarded as guarded

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("kafka")]

DESCRIBE, READ, WRITE, CREATE = (
    AclOperation.DESCRIBE,
    AclOperation.READ,
    AclOperation.WRITE,
    AclOperation.CREATE,
)
Right = tuple[ResourceType, str, AclOperation]


class Writer:
    """A user of its own, two topics, and a sender."""

    def __init__(self, guarded: Guarded) -> None:
        self.guarded = guarded
        self.user = f"loop-{uuid.uuid4().hex[:8]}"
        self.topic, self.positions = f"t-{uuid.uuid4().hex}", f"p-{uuid.uuid4().hex}"
        guarded.put_user(self.user)
        guarded.broker.make_topic(self.topic)

    def rights(self, exactly_once: bool) -> list[Right]:
        """Return those of the docs."""
        plain = [(ResourceType.TOPIC, self.topic, DESCRIBE), (ResourceType.TOPIC, self.topic, WRITE)]
        more = [
            *((ResourceType.TRANSACTIONAL_ID, "duetime-", each) for each in (DESCRIBE, WRITE)),
            *((ResourceType.GROUP, "duetime-", each) for each in (DESCRIBE, READ)),
            *((ResourceType.TOPIC, self.positions, each) for each in (DESCRIBE, READ, CREATE)),
        ]
        return [*plain, *more] if exactly_once else plain

    def grant(self, rights: Iterable[Right]) -> None:
        """Grant rights; returns when they count."""
        admin = self.guarded.broker.admin
        for kind, name, operation in rights:
            pattern = ResourcePatternType.PREFIXED if name.endswith("-") else ResourcePatternType.LITERAL
            rule = (kind, name, pattern, f"User:{self.user}", "*", operation, AclPermissionType.ALLOW)
            [made] = admin.create_acls([AclBinding(*rule)]).values()
            made.result(60)

    def write(self, exactly_once: bool = True) -> dict[str, str]:
        """Write a message; returns why it was refused, if it was."""
        settings = self.guarded.settings("TLS", self.topic, sasl_username=self.user)
        name = f"duetime-{uuid.uuid4().hex}-0"
        sender = KafkaSender(properties_of(settings), name, str, exactly_once, 10_000, self.positions)
        entry = OutboxEntry("1-1", self.topic, "id", 1, b"m", {})
        refused = sender.refusals([entry]) or sender.send([entry])
        sender.close()
        return {entry_id: refusal.reason for entry_id, refusal in refused.items()}


@pytest.fixture
def writer(guarded: Guarded) -> Writer:
    return Writer(guarded)


@pytest.mark.parametrize("exactly_once", [True, False])
def test_the_rights_of_the_docs_suffice_for_writing(writer: Writer, exactly_once: bool) -> None:
    writer.grant(writer.rights(exactly_once))
    assert writer.write(exactly_once) == {}
    assert [record.value for record in writer.guarded.broker.read_all(writer.topic, count=1)] == [b"m"]


def test_without_the_right_to_write_to_a_topic_its_messages_are_refused(writer: Writer) -> None:
    rights = writer.rights(exactly_once=True)
    writer.grant(rights[2:])
    assert writer.write() == {"1-1": "not_allowed"}
    writer.grant(rights[:1])  # it may be seen
    assert writer.write() == {"1-1": "not_allowed"}
    writer.grant(rights[1:2])
    assert writer.write() == {}


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        (ResourceType.TRANSACTIONAL_ID, "Transactional Id authorization failed"),
        (ResourceType.GROUP, "is the right to Describe its group granted"),
        (CREATE, "does not let us make it: create it with one partition"),
    ],
)
def test_a_right_that_is_missing_is_told_and_nothing_is_a_dead_letter(
    writer: Writer, missing: ResourceType | AclOperation, said: str
) -> None:
    writer.grant(right for right in writer.rights(exactly_once=True) if missing not in right)
    with pytest.raises((ConfigError, KafkaAway), match=said):
        writer.write()
