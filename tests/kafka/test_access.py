"""Passwords, certificates and rights: what the job needs where not everybody is let in, and what it says without."""

import subprocess
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from time import monotonic

import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialDeletion,
    UserScramCredentialUpsertion,
)
from pyspark.sql.streaming.datasource import ReadAllAvailable

from pipeline.config import KafkaSettings
from pipeline.core.errors import ConfigError, SourceError
from pipeline.ingest import kafka_reader
from pipeline.ingest.kafka_reader import RecordReader
from pipeline.ingest.kafka_source import KafkaSource, RangePlanner
from pipeline.kafka import cluster
from pipeline.kafka.cluster import Cluster, KafkaAway, Partition
from pipeline.kafka.properties import client_properties
from pipeline.runtime.process import wait_until
from tests.kafka import jars
from tests.kafka.broker import HOST, Broker, real_broker

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("kafka")]

PASSWORD, WRONG = "right-4711", "wrong-0815"
VALUES = [b"first", b"second"]
SCRAM = ScramMechanism.SCRAM_SHA_512

# Who comes without a password is the test itself, and the broker. They may do everything.
SERVER = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": "User:ANONYMOUS",
    "listener.name.login.sasl.enabled.mechanisms": "PLAIN",
    "listener.name.login.plain.sasl.jaas.config": "org.apache.kafka.common.security.plain.PlainLoginModule required "
    f'user_duetime="{PASSWORD}";',
    "listener.name.tls.sasl.enabled.mechanisms": "SCRAM-SHA-512",
    "listener.name.tls.scram-sha-512.sasl.jaas.config": "org.apache.kafka.common.security.scram.ScramLoginModule required;",
    "listener.name.tls.scram-sha-512.connections.max.reauth.ms": 3_000,  # how long who is no longer known stays
    "listener.name.tls.ssl.keystore.type": "PKCS12",
    "listener.name.tls.ssl.keystore.password": PASSWORD,
}


def make_certificate(folder: Path, name: str) -> None:
    """Make a key for 127.0.0.1, in a store, and a file of its certificate, which is its own authority."""
    store, certificate = folder / f"{name}.p12", folder / f"{name}.pem"
    keytool = [str(Path(jars.java_program()).with_name("keytool")), "-J-XX:TieredStopAtLevel=1"]
    common = ["-alias", "broker", "-storetype", "PKCS12", "-keystore", str(store), "-storepass", PASSWORD]
    made = ["-keyalg", "RSA", "-keysize", "2048", "-validity", "2", "-dname", "CN=broker", "-ext", f"san=ip:{HOST}"]
    for command in (["-genkeypair", *made], ["-exportcert", "-rfc", "-file", str(certificate)]):
        subprocess.run([*keytool, *command, *common], check=True, capture_output=True, stdin=subprocess.DEVNULL)


class Guarded:
    """A broker with a listener that wants a password, and one that shows a certificate as well."""

    def __init__(self, broker: Broker, folder: Path) -> None:
        self.broker, self.folder = broker, folder

    def put_user(self, name: str) -> None:
        """Let the listener with the certificate know a user."""
        self._alter(UserScramCredentialUpsertion(name, ScramCredentialInfo(SCRAM, 4096), PASSWORD.encode()))

    def drop_user(self, name: str) -> None:
        self._alter(UserScramCredentialDeletion(name, SCRAM))

    def _alter(self, change: UserScramCredentialUpsertion | UserScramCredentialDeletion) -> None:
        [altered] = self.broker.admin.alter_user_scram_credentials([change]).values()
        altered.result(60)

    def make_topic(self) -> str:
        name = f"t-{uuid.uuid4().hex}"
        self.broker.make_topic(name)
        self.broker.produce_all(name, VALUES)
        return name

    def rule(
        self,
        topic: str,
        operation: AclOperation,
        kind: AclPermissionType = AclPermissionType.ALLOW,
        user: str = "duetime",
    ) -> None:
        """Give or deny a right; returns when it counts."""
        rule = (ResourceType.TOPIC, topic, ResourcePatternType.LITERAL, f"User:{user}", "*", operation, kind)
        [made] = self.broker.admin.create_acls([AclBinding(*rule)]).values()
        made.result(60)
        assert wait_until(lambda: self.broker.admin.describe_acls(AclBindingFilter(*rule)).result(60) != [], 10)

    def grant_all(self, topic: str, user: str = "duetime") -> None:
        """Give what docs/kafka.md says that the job needs."""
        self.rule(topic, AclOperation.DESCRIBE, user=user)
        self.rule(topic, AclOperation.READ, user=user)

    def settings(self, listener: str, topics: str, **more: str) -> KafkaSettings:
        """Return settings of the job, with a file of properties as a user would write it.

        Args:
            more: properties, with ``_`` for each dot.
        """
        properties = {
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "PLAIN",
            "sasl.username": "duetime",
            "sasl.password": PASSWORD,
        }
        if listener == "TLS":
            properties |= {"security.protocol": "SASL_SSL", "sasl.mechanism": "SCRAM-SHA-512"}
            properties["ssl.ca.location"] = str(self.folder / "ours.pem")
        properties |= {name.replace("_", "."): value for name, value in more.items()}
        file = self.folder / f"{uuid.uuid4().hex}.properties"
        file.write_text("".join(f"{name}={value}\n" for name, value in properties.items()))
        return KafkaSettings(servers=self.broker.addresses[listener], topics=topics, client_config=str(file))

    def partition_of(self, topic: str) -> Partition:
        """Return the partition of a topic, as who may do everything sees it."""
        [partition] = Cluster(client_properties(self.broker.bootstrap, "")).partitions_of(topic)
        return partition


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("access")
    if jars.why_unavailable() is None:  # else there is no broker, either
        for name in ("ours", "other"):
            make_certificate(folder, name)
    settings = {**SERVER, "listener.name.tls.ssl.keystore.location": folder / "ours.p12"}
    with real_broker(listeners={"LOGIN": "SASL_PLAINTEXT", "TLS": "SASL_SSL"}, **settings) as broker:
        made = Guarded(broker, folder)
        made.put_user("duetime")
        yield made


def properties_of(settings: KafkaSettings) -> dict[str, str]:
    return client_properties(settings.servers, settings.client_config)


def read(reader: RecordReader, partition: Partition) -> list[bytes | None]:
    """Return the values of all records, read anew."""
    values: list[bytes | None] = []
    place = 0
    while place < len(VALUES):
        records, place = reader.read(partition, place, len(VALUES), 100, 1 << 20)
        values += records.values
    return values


def attempts(settings: KafkaSettings, partition: Partition) -> dict[str, Callable[[], object]]:
    """Return all the ways in which the job asks the cluster something."""
    properties = properties_of(settings)
    cluster, reader = Cluster(properties), RecordReader(properties)
    return {
        "id": cluster.cluster_id,
        "partitions": lambda: cluster.partitions_of(partition.topic),
        "ends": lambda: cluster.end_offsets([partition]),
        "read": lambda: read(reader, partition),
        "start": lambda: KafkaSource(settings, lambda _: None),
        "plan": lambda: RangePlanner(settings, properties, {}).latestOffset({}, ReadAllAvailable()),
    }


@pytest.mark.parametrize("listener", ["LOGIN", "TLS"])
def test_who_has_the_password_reads(guarded: Guarded, listener: str) -> None:
    topic = guarded.make_topic()
    guarded.grant_all(topic)
    properties = properties_of(guarded.settings(listener, topic))
    cluster, reader = Cluster(properties), RecordReader(properties)
    partitions = cluster.partitions_of(topic)
    assert partitions == cluster.partitions_of(f"^{topic}$") == [guarded.partition_of(topic)]
    assert cluster.first_offsets(partitions) == {partitions[0]: 0}
    assert cluster.end_offsets(partitions) == {partitions[0]: 2}
    assert read(reader, partitions[0]) == VALUES
    reader.close()


def test_the_rights_of_the_docs_suffice(guarded: Guarded) -> None:
    """The client looks for the coordinator of a group, which nobody has allowed; this must not matter, sooner or later."""
    topic = guarded.make_topic()
    guarded.grant_all(topic)
    settings = guarded.settings("LOGIN", topic)
    source = KafkaSource(settings, lambda _: None)
    source.close()
    [partition] = source.partitions
    planner = RangePlanner(settings, source.properties, {})
    assert [*planner.latestOffset({}, planner.getDefaultReadLimit()).values()] == [2]
    reader = RecordReader(source.properties)
    assert [read(reader, partition) for _ in range(10)] == [VALUES] * 10
    reader.close()


def test_a_right_that_is_missing_is_named(guarded: Guarded) -> None:
    unseen, unread = guarded.make_topic(), guarded.make_topic()
    guarded.rule(unseen, AclOperation.READ)  # which has Describe with it
    guarded.rule(unseen, AclOperation.DESCRIBE, AclPermissionType.DENY)
    guarded.rule(unread, AclOperation.DESCRIBE)
    settings = guarded.settings("LOGIN", f"{unseen},{unread}")
    cluster, reader = Cluster(properties_of(settings)), RecordReader(properties_of(settings))
    for ask in (lambda: cluster.partitions_of(unseen), lambda: KafkaSource(settings, lambda _: None)):
        with pytest.raises(ConfigError, match=rf"refuses Describe on the topic {unseen} \(.*\); grant it to the user"):
            ask()
    assert cluster.partitions_of(f"^{unseen}$") == [], "a pattern finds what may be described"
    [partition] = cluster.partitions_of(f"^{unread}$")
    assert cluster.end_offsets([partition]) == {partition: 2}
    with pytest.raises(ConfigError, match=rf"refuses Read on the topic {unread} \(.*\); grant it to the user"):
        read(reader, partition)
    reader.close()


@pytest.mark.parametrize("listener", ["LOGIN", "TLS"])
def test_a_wrong_password_is_told_at_once_and_never_shown(
    guarded: Guarded,
    listener: str,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (cluster, kafka_reader):
        monkeypatch.setattr(module, "ANSWER_SEC", 240.0)
    topic = guarded.make_topic()
    settings = guarded.settings(listener, topic, sasl_password=WRONG)
    said = ""
    for what, ask in attempts(settings, guarded.partition_of(topic)).items():
        began = monotonic()
        with pytest.raises(ConfigError) as refused:
            ask()
        assert monotonic() - began < 120, what
        assert f"Kafka at {settings.servers} does not let us in (" in str(refused.value), what
        assert "Authentication failed" in str(refused.value) and "see kafka.client_config" in str(refused.value), what
        said += f"{refused.value!r} {refused.value.__cause__!r} {refused.value.__context__!r}"
    out, err = capfd.readouterr()
    assert WRONG not in said + out + err + caplog.text


def test_who_is_dropped_is_told_so_and_who_is_known_again_goes_on(guarded: Guarded) -> None:
    topic = guarded.make_topic()
    guarded.put_user("leaver")
    guarded.grant_all(topic, "leaver")
    properties = properties_of(guarded.settings("TLS", topic, sasl_username="leaver"))
    cluster, reader = Cluster(properties), RecordReader(properties)
    [partition] = cluster.partitions_of(topic)
    assert read(reader, partition) == VALUES
    guarded.drop_user("leaver")

    def is_refused(ask: Callable[[], object]) -> bool:
        try:
            ask()
        except ConfigError as exc:
            assert "does not let us in (" in str(exc)
            return True
        return False

    assert wait_until(lambda: is_refused(lambda: read(reader, partition)), 10)
    assert wait_until(lambda: is_refused(cluster.cluster_id), 10)
    guarded.put_user("leaver")
    assert wait_until(lambda: not is_refused(cluster.cluster_id), 10)
    assert wait_until(lambda: not is_refused(lambda: read(reader, partition)), 10)
    for client in (cluster, reader):
        client._reasons.check()  # nothing is left of it for the next silence
    guarded.broker.delete_topic(topic)
    assert cluster.partitions_of(topic) == [], "what Kafka says counts, and not why it was silent before"
    reader.close()


@pytest.mark.parametrize("fault", ["authority", "name"])
def test_a_certificate_that_is_not_trusted_is_the_reason_that_is_told(
    guarded: Guarded, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (cluster, kafka_reader):
        monkeypatch.setattr(module, "ANSWER_SEC", 1.0)
    topic = guarded.make_topic()
    settings = guarded.settings("TLS", topic)
    if fault == "authority":
        settings = guarded.settings("TLS", topic, ssl_ca_location=str(guarded.folder / "other.pem"))
    else:  # the certificate has the address alone
        settings = replace(settings, servers=settings.servers.replace(HOST, "localhost"))
    asked = attempts(settings, guarded.partition_of(topic))
    reason = f"{settings.servers}/bootstrap: SSL handshake failed: .*certificate verify failed"
    for what in ("id", "partitions", "ends", "read"):
        with pytest.raises(KafkaAway, match=reason):
            asked[what]()
    with pytest.raises(SourceError, match=rf"Kafka can't be reached \(.*{reason}.*\); .* kafka.client_config"):
        asked["start"]()
