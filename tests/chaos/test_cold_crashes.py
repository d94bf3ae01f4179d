"""``jobs/hydrate.py`` as a process: how it ends, and that kill -9 at any moment neither loses nor doubles a cold message."""

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event

import pytest

from pipeline.core.messages import Message
from pipeline.ingest.cold_folder import IDENTITY_NAME, SOURCE_ID
from pipeline.runtime.process import wait_until
from pipeline.store.cold import read_hydrators
from tests.ingest.cold_world import ColdWorld
from tests.servers import RealServer

ROOT = Path(__file__).resolve().parents[2]
MESSAGES = 300_000
KILLS = 6

Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def world(server: RealServer, tmp_path: Path) -> ColdWorld:
    return ColdWorld(server, tmp_path, transaction_messages=5_000)


@pytest.fixture
def spawn(world: ColdWorld) -> Iterator[Spawn]:
    """Start the job; whatever is left of it is killed."""
    running: list[subprocess.Popen[str]] = []

    def start(*arguments: str, **environ: str) -> "subprocess.Popen[str]":
        bare = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        settings = {
            "PYTHONPATH": str(ROOT),
            "REDIS_URL": world.redis.url,
            "DUETIME_REDIS_NAMESPACE": world.redis.namespace,
            "DUETIME_COLD_FOLDER": str(world.path),
            "DUETIME_COLD_HORIZON_HOURS": "8784",
            "DUETIME_COLD_LEAD_HOURS": "8000",
        }
        process = subprocess.Popen(
            [sys.executable, "-P", str(ROOT / "jobs" / "hydrate.py"), *arguments],
            env={**bare, **settings, **environ},
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def ended(process: "subprocess.Popen[str]") -> tuple[int, str]:
    _, said = process.communicate(timeout=60)
    return process.returncode, said


def take_out(world: ColdWorld, found: Counter[str]) -> None:
    """Deliver all that is in Redis."""
    for keys in world.shards:
        for start in world.client.zrange(keys.buckets(), 0, -1):
            members = world.client.zrange(keys.bucket(int(start)), 0, -1)
            found.update(Message.from_member(member, 0).body for member in members)
            world.client.unlink(keys.bucket(int(start)))
        world.client.unlink(keys.buckets())


def test_it_brings_in_what_is_due_soon_and_ends(world: ColdWorld, spawn: Spawn) -> None:
    world.write([world.line("a", 2), world.line("b", 3), world.line("later", 8_700)])
    code, said = ended(spawn("--once"))
    assert code == 0, said
    assert sorted(world.waiting()) == ["a", "b"]
    assert "2 messages due before 20" in said and said.rstrip().endswith(
        "brought 2 messages of 0 whole files into Redis"
    )
    assert not world.client.exists(world.shards[0].hydrator())
    [progress] = read_hydrators(world.client, world.shards[0])
    assert (progress.messages, progress.files, progress.is_done, progress.has_ended) == (2, 0, True, True)


def test_it_runs_until_it_is_stopped(world: ColdWorld, spawn: Spawn) -> None:
    process = spawn()
    wait_until(lambda: world.client.exists(world.shards[0].hydrator()) == 1, 30)
    wait_until(lambda: len(read_hydrators(world.client, world.shards[0])) == 1, 30)
    process.send_signal(signal.SIGINT)
    code, said = ended(process)
    assert (code, world.client.exists(world.shards[0].hydrator())) == (0, 0), said
    assert "hydrate is up: it reads" in said and "Traceback" not in said


def test_without_a_folder_or_with_another_one_it_says_so_and_ends(
    world: ColdWorld, spawn: Spawn, tmp_path: Path
) -> None:
    assert ended(spawn("--once", DUETIME_COLD_FOLDER="")) == (
        2,
        "hydrate: Name the folder where messages wait: set cold.folder, or give --folder.\n",
    )
    code, said = ended(spawn("--once", "--folder", str(tmp_path / "away")))
    assert code == 1
    assert said == (
        f"hydrate: The cold folder {tmp_path}/away has no {IDENTITY_NAME}: mount the right one, or bring it back from a backup.\n"
    )


def test_an_empty_folder_in_the_place_of_the_right_one_is_an_error(world: ColdWorld, spawn: Spawn) -> None:
    world.write([world.line("a", 2)])
    world.path.rename(world.path.with_name("away"))
    world.path.mkdir()
    code, said = ended(spawn("--once"))
    assert code == 1 and "mount the right one" in said


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_kill_9_at_any_moment_loses_and_doubles_nothing(world: ColdWorld, spawn: Spawn, seed: int) -> None:
    chance = random.Random(seed)
    lines = [world.line(f"{n}", 2 + 40 * chance.random(), f"k{n}" if n % 10 == 0 else "") for n in range(MESSAGES)]
    files = [lines[first : first + MESSAGES // 8] for first in range(0, MESSAGES, MESSAGES // 8)]
    assert world.write(*files).stored == MESSAGES
    assert sum(world.cold_hours().values()) == MESSAGES
    found: Counter[str] = Counter()
    kills = 0
    while world.names():
        process = spawn("--once", DUETIME_COLD_LEAD_HOURS=str(chance.choice([20, 8000])))
        before = moved(world)
        wait_until(lambda process=process, before=before: process.poll() is not None or moved(world) != before, 60)
        Event().wait(chance.random() * 0.15)
        if kills < KILLS and process.poll() is None:
            process.kill()
            kills += 1
        process.wait(120)
        world.client.delete(world.shards[0].hydrator())  # its lease has ended
        take_out(world, found)
    assert kills >= 3
    assert found == Counter(str(n) for n in range(MESSAGES))
    assert world.cold_hours() == {} and world.counters() == {"stored": MESSAGES}


def moved(world: ColdWorld) -> list[tuple[bytes, float]]:
    """When the marker of each file moved last."""
    return list(world.client.zrange(world.shards[0].markers(SOURCE_ID), 0, -1, withscores=True))
