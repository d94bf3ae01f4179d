"""The drain loop: throughput, lateness, idling, claims and flood. ``--only`` chooses among these."""

import shutil
from types import ModuleType
from typing import Any

from bench import claims, flood, idle, lateness, throughput
from bench.common import WORK, Options, Result, describe_origin, new_result, say
from bench.server import empty_server

# Each has plan(Options) -> settings, take_samples(settings) -> samples and table(settings, samples) -> str.
PARTS: dict[str, ModuleType] = {
    "throughput": throughput,
    "lateness": lateness,
    "idle": idle,
    "claims": claims,
    "flood": flood,
}


def run(options: Options) -> Result:
    """Measure all parts, or those of ``--only``."""
    chosen = [name for name in PARTS if name in (options.only or PARTS)]
    settings: dict[str, Any] = {name: PARTS[name].plan(options) for name in chosen}
    result = new_result("drain", options, settings)
    try:
        with empty_server(WORK) as server:
            facts = server.facts()
        result["versions"]["server"], result["server_settings"] = facts["server"], facts["settings"]
        for name in chosen:
            say(f"drain: {name}")
            result["samples"][name] = PARTS[name].take_samples(settings[name])
    finally:
        shutil.rmtree(WORK, ignore_errors=True)
    return result


def tables(result: Result) -> str:
    """Lay the result out for eyes."""
    settings = ", ".join(
        f"{name} {value}" if value else f"no {name}" for name, value in result["server_settings"].items()
    )
    parts = [
        f"#### {name.capitalize()}\n\n{PARTS[name].table(result['settings'][name], samples)}"
        for name, samples in result["samples"].items()
    ]
    return "\n\n".join([f"{describe_origin(result)}\nServer settings {settings}.", *parts])
