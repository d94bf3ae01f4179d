"""The command of the wheel: ``duetime JOB …`` is what ``./spark-submit.sh jobs/JOB.py …`` is in a checkout."""

import sys
from importlib import import_module
from typing import Final, NoReturn

from pipeline import __version__
from pipeline.cli import EXIT_SUCCESS, EXIT_USAGE, run_main
from pipeline.core.text import install_text

# All that need no Spark.
JOBS: Final = {
    "schedule": "schedule a message",
    "messages": "show, list, cancel or move messages that wait",
    "drain": "deliver messages when they are due",
    "hydrate": "bring messages that wait in the cold folder into Redis",
    "consume": "print the messages of a topic, as a consumer of a group",
    "serve": "answer HTTP: schedule, find, move and cancel messages",
    "webhooks": "post the messages of topics to their URLs",
    "topics": "show topics and groups, change and pause them",
    "dead_letters": "handle messages that could not be delivered",
    "status": "show what is scheduled, in flight, delivered and late",
}
EXTRAS: Final = {"webhooks": "webhooks", "serve": "api", "hydrate": "cold"}  # of the jobs that need more than the base

INGEST: Final = "ingest runs on Spark, so it is started in the checkout: ./spark-submit.sh jobs/ingest.py"


def main() -> NoReturn:
    """Run the job that the first argument names."""
    name = sys.argv[1].replace("-", "_") if len(sys.argv) > 1 else "--help"
    if name == "__version":
        print(f"duetime {__version__}")
        sys.exit(EXIT_SUCCESS)
    if name == "ingest":
        print(f"duetime: {INGEST}.", file=sys.stderr)
        sys.exit(EXIT_USAGE)
    if name not in JOBS:
        is_asked = name in ("__help", "_h", "help")
        usage = ["usage: duetime JOB [options]; duetime JOB --help says more", ""]
        usage += [f"  {job:<14}{about}" for job, about in JOBS.items()]
        usage += ["", f"{INGEST}."]
        print("\n".join(usage), file=sys.stdout if is_asked else sys.stderr)
        sys.exit(EXIT_SUCCESS if is_asked else EXIT_USAGE)
    try:
        job = import_module(f"{__package__}.jobs.{name}")
    except ModuleNotFoundError as exc:
        if name not in EXTRAS:
            raise
        print(f"duetime: {name} also needs {exc.name}: {install_text(EXTRAS[name])}.", file=sys.stderr)
        sys.exit(EXIT_USAGE)
    del sys.argv[1]
    run_main(name, job.main)
