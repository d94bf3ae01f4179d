"""Crash a job at random for as long as you like; exits 1 at the first promise that is broken.

    python -m tests.chaos.long --minutes 60 --seed 1              # the ingest job
    python -m tests.chaos.long --minutes 60 --seed 1 --job drain  # drain loops

A round is a checkout of its own: crashes of the ingest job at points, of processes and under settings that are drawn at random, or
faults of all kinds that hit drain loops under load; then a run to the end, and the comparison of all that was delivered with all
that was sent. It prints its seed first; ``--seed N --rounds 1`` runs that round again, though the operating system decides anew
where exactly a kill hits.
"""

import argparse
import sys
import time
import traceback
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from tests.chaos import drain_rounds
from tests.chaos.scenario import Scenario, random_crash
from tests.e2e.commands import Checkout
from tests.servers import real_server

CRASHES_PER_ROUND = 3


def run_ingest_round(seed: int) -> int:
    """Run one round of the ingest job and return how many messages were delivered."""
    random = Random(seed)
    with TemporaryDirectory(prefix="duetime-chaos-") as folder, real_server() as server:
        checkout = Checkout(Path(folder).resolve())
        scenario = Scenario(checkout, server, seed, shards=random.randint(1, 3))
        scenario.start_drain()
        try:
            for _ in range(CRASHES_PER_ROUND):
                crash = random_crash(random)
                print(f"  {crash}", flush=True)
                scenario.crash(crash)
            scenario.settle(random_crash(random, once=True))
        finally:
            scenario.close()
            checkout.close()
        return scenario.workload.expected.total()


ROUNDS = {"ingest": run_ingest_round, "drain": drain_rounds.run_round}


def main() -> int:
    """Run rounds until the time is over."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.long", description="Crash a job at random.")
    parser.add_argument("--job", choices=ROUNDS, default="ingest", help="which job (default: ingest)")
    parser.add_argument("--minutes", type=float, default=60, help="begin no round after so many minutes (default: 60)")
    parser.add_argument("--rounds", type=int, default=sys.maxsize, help="run at most so many rounds")
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of the first round; the next has the next (default: 1)"
    )
    given = parser.parse_args()
    end = time.monotonic() + given.minutes * 60
    for seed in range(given.seed, given.seed + given.rounds):
        if time.monotonic() >= end:
            break
        print(f"seed {seed}", flush=True)
        try:
            delivered = ROUNDS[given.job](seed)
        except Exception:
            traceback.print_exc()
            print(f"seed {seed} FAILED", flush=True)
            return 1
        print(f"seed {seed} ok: {delivered} messages", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
