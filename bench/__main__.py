"""The command behind ``bench/run.sh``: run one benchmark or all, print the tables, keep the raw samples."""

import argparse
import importlib
import os
import signal
import subprocess
import sys

from bench.common import ROOT, Options, save_result, say
from pipeline.core.errors import PipelineError

BENCHMARKS = (
    "ingest",
    "latency",
    "backlog",
    "drain",
    "streams",
    "kafka",
    "scale",
    "cold",
    "client",
    "peers",
    "api",
    "pages",
    "guard",
)  # bench/<name>.py with run(Options) -> Result and tables(Result) -> str
OTHERS = ("profile", "report")


def parse_arguments(arguments: list[str]) -> tuple[str, Options]:
    """Read the command line; argparse exits 2 with a sentence on wrong use."""
    parser = argparse.ArgumentParser(
        prog="bench/run.sh",
        description="Measure this checkout; tables go to the screen, raw samples to bench/results/. bench/README.md explains both.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "what",
        nargs="?",
        default="all",
        choices=[*BENCHMARKS, "all", *OTHERS],
        help="a benchmark, or all of them (default); profile: where the time goes; report: write the tables into bench/README.md",
    )
    parser.add_argument("--quick", action="store_true", help="small and few: shows that it works, not how fast")
    parser.add_argument(
        "--rows",
        type=int,
        metavar="N",
        help="lines or messages (ingest: 1,000,000; backlog: 200,000; drain: 300,000, and a flood of 1,000,000; "
        "kafka: 1,000,000 in, 200,000 out; peers: 10,000, and times as many of the fast ones)",
    )
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="rounds after the first (5; 3 of lateness), or files (latency: 60)"
    )
    parser.add_argument("--master", default="local[*]", metavar="URL", help="Spark's master (default: local[*])")
    parser.add_argument(
        "--only",
        default="",
        metavar="A,B",
        help="some subjects of ingest, or of the peers, or parts of drain, streams, kafka, scale, cold, api or profile",
    )
    parser.add_argument(
        "--max",
        dest="backlog_max",
        type=int,
        default=10_000_000,
        metavar="N",
        help="largest backlog, and most messages that drain claims from (default: 10,000,000)",
    )
    parser.add_argument(
        "--messages",
        type=int,
        metavar="N",
        help="of cold: how many its part bounded writes (100,000,000: 2 GB of disk, some minutes)",
    )
    parser.add_argument(
        "--check", action="store_true", help="of guard: keep nothing, and fail if a part has become slower by a third"
    )
    parser.add_argument(
        "--install",
        action="store_true",
        help="of peers: first install what is not there, into BENCH_PEERS or .duetime/peers",
    )
    given = parser.parse_args(arguments)
    if given.install and given.what != "peers":
        parser.error("--install is for peers")
    if given.check and given.what != "guard":
        parser.error("--check is for guard")
    only = tuple(name for name in given.only.split(",") if name)
    return given.what, Options(
        given.quick,
        given.rows,
        given.rounds,
        given.master,
        only,
        given.backlog_max,
        given.check,
        given.install,
        given.messages,
    )


def main(arguments: list[str]) -> int:
    """Return the exit code."""
    what, options = parse_arguments(arguments)
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # what was started is ended, work is cleared
    for name in [name for name in os.environ if name == "REDIS_URL" or name.startswith("DUETIME_")]:
        del os.environ[name]  # the defaults are measured
    if what == "all":
        # Each in a process of its own, so that none runs in the JVM that another has warmed up.
        rest = [word for word in arguments if word != "all"]
        commands = [[sys.executable, "-P", "-m", "bench", name, *rest] for name in BENCHMARKS]
        return max(subprocess.run(command, cwd=ROOT, check=False).returncode for command in commands)
    module = importlib.import_module(f"bench.{'profiles' if what == 'profile' else what}")
    try:
        if what in OTHERS:
            print(module.run(options))
            return 0
        result = module.run(options)
    except PipelineError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    print(f"\n{module.tables(result)}\n", flush=True)
    if options.check:
        fallen = importlib.import_module("bench.guard").fallen_parts(result)
        for sentence in fallen.values():
            say(sentence)
        return 1 if fallen else 0
    say(f"The samples are in {save_result(result).relative_to(ROOT)}.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
