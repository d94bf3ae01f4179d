"""How clients reach a Kafka cluster, and what of their settings is not for users to choose."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pipeline.core.errors import ConfigError

# What correctness rests on; nobody may set these.
READING: Final[Mapping[str, Any]] = {
    "enable.auto.commit": False,
    "enable.partition.eof": True,
    "isolation.level": "read_committed",
    "auto.offset.reset": "error",
}
WRITING: Final[Mapping[str, Any]] = {"acks": "all", "enable.idempotence": True, "delivery.report.only.error": True}
_OWN: Final = frozenset({*READING, *WRITING, "request.required.acks", "transactional.id", "transaction.timeout.ms"}) | {
    *("bootstrap.servers", "metadata.broker.list")
}
_PROPERTY: Final = re.compile(r"\s*([A-Za-z0-9._]+)\s*=\s*(.*?)\s*")


def client_properties(servers: str, file: str) -> dict[str, str]:
    """Return how clients reach the cluster.

    Raises:
        ConfigError: no server is named, or the file is not fit.
    """
    if not servers:
        raise ConfigError("Name the Kafka cluster with --kafka-servers, such as --kafka-servers localhost:9092.")
    properties = {"bootstrap.servers": servers}
    if not file:
        return properties
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"The file kafka.client_config, {file}, can't be read ({exc}).") from exc
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        found = _PROPERTY.fullmatch(line)
        if found is None:
            raise ConfigError(f"{file}, line {number}, is no property; write name=value.")
        if found[1] in _OWN:
            raise ConfigError(f"{file}, line {number}: {found[1]} is not for you to set; what is stored rests on it.")
        properties[found[1]] = found[2]
    return properties
