"""Run more seeds than the tests do: python -m tests.simulation --seeds 100000 --from 1000"""

import argparse
import sys
from collections import Counter

from tests.simulation.world import simulate

PROGRESS_SEEDS = 1_000


def main(arguments: list[str]) -> int:
    """Exit 1 at the first seed that breaks a promise, with its history."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1_000, metavar="N", help="how many (default: 1000)")
    parser.add_argument("--from", dest="first", type=int, default=0, metavar="SEED", help="the first (default: 0)")
    parser.add_argument("--trace", action="store_true", help="print the history of every run")
    given = parser.parse_args(arguments)
    seen: Counter[str] = Counter()
    for seed in range(given.first, given.first + given.seeds):
        result = simulate(seed)
        seen += result.seen
        if given.trace or result.violations:
            print(result)
        if result.violations:
            return 1
        if (seed + 1 - given.first) % PROGRESS_SEEDS == 0:
            print(f"{seed + 1 - given.first} seeds keep every promise", file=sys.stderr)
    print(f"{given.seeds} seeds keep every promise; what fell on them:")
    for kind, count in sorted(seen.items()):
        print(f"{count:8}  {kind}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
