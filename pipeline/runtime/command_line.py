"""What has to be known of spark-submit's command line; the rest passes unread, for Spark to judge."""

import re
from collections.abc import Sequence
from pathlib import Path

# Options whose value may end in ".py" without being the script.
NOT_THE_SCRIPT = frozenset(
    ("--py-files", "--files", "--archives", "--jars", "--conf", "-c", "--properties-file", "--name")
)


def split_command_line(argv: Sequence[str]) -> tuple[list[str], str | None, list[str]]:
    """Return spark-submit's options, the script and the script's arguments; everything is an option if there is no script.

    The script is the first argument that ends in ``.py`` and is not the value of an option.
    """
    for index, argument in enumerate(argv):
        if argument.endswith(".py") and argument[0] != "-" and (index == 0 or argv[index - 1] not in NOT_THE_SCRIPT):
            return list(argv[:index]), argument, list(argv[index + 1 :])
    return list(argv), None, []


def take_option(arguments: Sequence[str], *names: str) -> tuple[list[str], list[str]]:
    """Return ``arguments`` without the options ``names``, and the values that those had."""
    rest: list[str] = []
    values: list[str] = []
    left = iter(arguments)
    for argument in left:
        name, equals, value = argument.partition("=")
        if argument in names:
            values.append(next(left, ""))
        elif equals and name in names:
            values.append(value)
        else:
            rest.append(argument)
    return rest, values


def read_spark_setting(options: Sequence[str], conf_dir: Path, option: str, key: str) -> str | None:
    """Return a setting as Spark would: its option, else ``--conf``, else the properties file; None if nowhere.

    ``conf_dir`` holds ``spark-defaults.conf``; ``option`` may be "" for a key without an option of its own.
    """
    for value in reversed(take_option(options, option)[1]):
        return value
    for pair in reversed(take_option(options, "--conf", "-c")[1]):
        if pair.partition("=")[0].strip() == key:
            return pair.partition("=")[2].strip()
    file = Path([str(conf_dir / "spark-defaults.conf"), *take_option(options, "--properties-file")[1]][-1])
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    values = re.findall(rf"^[ \t]*{re.escape(key)}[ \t=]+(.*?)[ \t]*$", text, re.MULTILINE)
    return values[-1] if values else None


def append_file(options: list[str], conf_dir: Path, option: str, key: str, path: Path) -> list[str]:
    """Add ``path`` to the comma-separated files of ``option``, whose other home is the setting ``key``."""
    others = read_spark_setting(options, conf_dir, option, key)
    return [*take_option(options, option)[0], option, f"{others},{path}" if others else str(path)]
