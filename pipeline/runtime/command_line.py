"""spark-submit's command line, read as spark-submit reads it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.core.errors import ConfigError

# spark-submit's options (Spark 4.3, SparkSubmitOptionParser): which words belong to Spark and which to the script depends
# on whether an option takes a value.
VALUE_OPTIONS = frozenset(
    """--archives --class --conf -c --deploy-mode --driver-class-path --driver-cores --driver-java-options
    --driver-library-path --driver-memory --exclude-packages --executor-cores --executor-memory --files --jars --keytab
    --kill --master --name --num-executors --packages --principal --properties-file --proxy-user --py-files --queue
    --remote --repositories --status --total-executor-cores""".split()  # noqa: SIM905 (a list would fill the screen)
)
SWITCHES = frozenset(
    ("--help", "-h", "--load-spark-defaults", "--supervise", "--usage-error", "--verbose", "-v", "--version")
)


@dataclass(frozen=True, slots=True)
class CommandLine:
    """``spark-submit``'s arguments: its own options as (name, value) pairs, the script or jar, and what belongs to that."""

    options: tuple[tuple[str, str | None], ...]
    script: str | None
    arguments: tuple[str, ...]

    def get(self, name: str) -> str | None:
        """Return the value of the last ``name``, "" for a switch, None if it isn't given."""
        return next((value or "" for option, value in reversed(self.options) if option == name), None)

    def has(self, *names: str) -> bool:
        return any(option in names for option, _ in self.options)

    def without(self, name: str) -> list[str]:
        """Return the options as words, those called ``name`` left out."""
        kept = (pair for pair in self.options if pair[0] != name)
        return [word for pair in kept for word in pair if word is not None]


def parse_command_line(argv: Sequence[str]) -> CommandLine:
    """Split ``argv`` as spark-submit does: its options up to the first other word, which is the script.

    Raises:
        ConfigError: An option that spark-submit doesn't have, or one without its value.
    """
    options: list[tuple[str, str | None]] = []
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if word in SWITCHES:
            options.append((word, None))
        elif word in VALUE_OPTIONS:
            if (following := next(words, None)) is None:
                raise ConfigError(f"{word} needs a value: ./spark-submit.sh --spark-help says which.")
            options.append((word, following))
        elif equals and name.startswith("--") and name in VALUE_OPTIONS:
            options.append((name, value))
        elif word.startswith("-"):
            raise ConfigError(
                f"There is no option {word}: see --help, and note that a job's own options follow its name."
            )
        else:
            return CommandLine(tuple(options), word, tuple(words))
    return CommandLine(tuple(options), None, ())


def read_spark_setting(line: CommandLine, conf_dir: Path, option: str, key: str) -> str | None:
    """Return a setting as Spark would: its option, else ``--conf``, else the properties file; None if nowhere.

    ``conf_dir`` holds ``spark-defaults.conf``; ``option`` may be "" for a key without an option of its own.
    """
    if (value := line.get(option)) is not None:
        return value
    for name, pair in reversed(line.options):
        if name in ("--conf", "-c") and (pair or "").partition("=")[0].strip() == key:
            return (pair or "").partition("=")[2].strip()
    named = line.get("--properties-file")
    files = [Path(named)] if named else []
    if not named or line.has("--load-spark-defaults"):
        files.append(conf_dir / "spark-defaults.conf")
    for file in files:
        if file.is_file() and (value := _read_properties(file).get(key)) is not None:
            return value
    return None


def _read_properties(path: Path) -> dict[str, str]:
    """Read the part of Java's properties format that Spark's files use: ``key value``, ``key=value``, # comments."""
    properties = {}
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if text.strip() and text.strip()[0] not in "#!":
            key, _, value = text.strip().replace("=", " ", 1).replace("\t", " ").partition(" ")
            properties[key] = value.strip()
    return properties
