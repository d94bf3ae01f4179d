"""Kafka: requests from a topic into the schedule, and messages that are due into a topic. ``--only`` chooses among the parts."""

import shutil
from importlib.metadata import version
from types import ModuleType
from typing import Any

from bench import kafka_in, kafka_latency, kafka_lateness, kafka_others, kafka_out
from bench.broker import bench_broker, kafka_version
from bench.common import WORK, Options, Result, describe_origin, new_result, say
from bench.server import empty_server

# Each has plan(Options) -> settings, take_samples(settings, broker) -> samples and table(settings, samples) -> str.
PARTS: dict[str, ModuleType] = {
    "in": kafka_in,
    "latency": kafka_latency,
    "out": kafka_out,
    "lateness": kafka_lateness,
    "others": kafka_others,
}
TITLES = {
    "in": "From a topic",
    "latency": "From produced to stored",
    "out": "Into a topic",
    "lateness": "From due to consumed",
    "others": "Beside other ways",
}


def run(options: Options) -> Result:
    """Measure all parts, or those of ``--only``, on one broker."""
    chosen = [name for name in PARTS if name in (options.only or PARTS)]
    settings: dict[str, Any] = {name: PARTS[name].plan(options) for name in chosen}
    result = new_result("kafka", options, settings)
    try:
        with empty_server(WORK) as server:
            facts = server.facts()
        result["versions"]["server"], result["server_settings"] = facts["server"], facts["settings"]
        with bench_broker(WORK, options.quick) as broker:
            result["versions"] |= {"kafka": kafka_version(), "confluent-kafka": version("confluent-kafka")}
            for name in chosen:
                say(f"kafka: {name}")
                result["samples"][name] = PARTS[name].take_samples(settings[name], broker)
    finally:
        shutil.rmtree(WORK, ignore_errors=True)
    return result


def tables(result: Result) -> str:
    """Lay the result out for eyes."""
    settings = ", ".join(
        f"{name} {value}" if value else f"no {name}" for name, value in result["server_settings"].items()
    )
    parts = [
        f"#### {TITLES[name]}\n\n{PARTS[name].table(result['settings'][name], samples)}"
        for name, samples in result["samples"].items()
    ]
    return "\n\n".join([f"{describe_origin(result)}\nServer settings {settings}.", *parts])
