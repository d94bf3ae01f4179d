"""The house rules that a machine can hold."""

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

import tests.examples
from pipeline.core.messages import Reason

ROOT = Path(__file__).resolve().parents[1]
PIPELINE = ROOT / "pipeline"
SOURCES = sorted(PIPELINE.rglob("*.py"))
JOBS = sorted((ROOT / "jobs").glob("*.py"))
BENCH = sorted((ROOT / "bench").glob("*.py"))
SCRIPTS = sorted((PIPELINE / "store" / "lua").glob("*.lua"))
INCLUDES = sorted((PIPELINE / "store" / "lua" / "include").glob("*.lua"))
LINES_MAX, FUNCTION_LINES_MAX = 310, 75
LONGER = {
    "consumer.py": 370,  # one state machine: two modules that reach into each other are harder to read
    "config.py": 420,  # every setting with its unit, and how they are read: one home
}

ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
READING_PATH_LINES_MAX = 3_000
MARKDOWN_LINE_MAX = 100

# What a folder (or module) of pipeline/ may import of the others, itself aside, as docs/architecture.md says.
FLOORS = {
    part: set() if others == "nothing" else set(others.split(", "))
    for part, others in re.findall(r"^\| `(\w+)` \| ([\w, ]+) \|", ARCHITECTURE, re.M)
}
# The only places for some libraries.
HOMES = {
    "redis": {"store"},
    "pyspark": {"ingest", "spark"},
    "pyarrow": {"ingest", "store"},  # in store/resp.py alone, which frames what ingest has as columns
    "numpy": {"ingest"},
    "inotify_simple": {"landing"},
    "confluent_kafka": {"ingest", "kafka"},
    "tqdm": {"ingest"},
    "prometheus_client": {"drain", "ingest", "metrics", "web", "webhooks"},
    "starlette": {"web"},
    "uvicorn": {"web"},
    "jinja2": {"web"},
    "urllib3": {"webhooks"},
}


def floor_of(path: Path) -> str:
    relative = path.relative_to(PIPELINE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            found.add(node.module or "")
    return found


def broken(rule: Callable[[Path], None], paths: list[Path]) -> dict[str, str]:
    """Return what a rule has to say of each file that breaks it."""
    said = {}
    for path in paths:
        try:
            rule(path)
        except AssertionError as error:
            said[str(path.relative_to(ROOT))] = str(error)
    return said


@pytest.mark.xdist_group("tidy")
def test_the_tests_of_a_group_run_in_one_worker(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("loadgroup", False):  # which pytest-xdist says by the name of the test
        assert request.node.nodeid.endswith("@tidy")


def test_a_module_imports_only_from_the_floors_below() -> None:
    def rule(path: Path) -> None:
        floor = floor_of(path)
        if floor == "__init__":
            return
        ours = {name.split(".")[1] for name in imports_of(path) if name.startswith("pipeline.")}
        assert ours - FLOORS[floor] - {floor} == set()

    assert broken(rule, SOURCES) == {}


def test_libraries_stay_where_they_belong() -> None:
    def rule(path: Path) -> None:
        libraries = {name.split(".")[0] for name in imports_of(path)}
        strangers = {library for library in libraries & HOMES.keys() if floor_of(path) not in HOMES[library]}
        assert strangers == set()

    assert broken(rule, SOURCES) == {}


def test_core_uses_the_standard_library_alone() -> None:
    import sys

    for path in (PIPELINE / "core").glob("*.py"):
        roots = {name.split(".")[0] for name in imports_of(path)}
        assert roots <= sys.stdlib_module_names | {"pipeline"}, path


def test_only_clock_reads_a_clock() -> None:
    def rule(path: Path) -> None:
        if (
            path == PIPELINE / "core" / "clock.py" or floor_of(path) == "runtime"
        ):  # set-up measures itself, before core is there
            return
        calls = re.findall(
            r"\b(?:time\.(?:time|monotonic|sleep)\w*|datetime\.(?:now|utcnow)|date\.today)\(", path.read_text()
        )
        assert calls == []

    assert broken(rule, SOURCES) == {}


def test_key_text_is_in_keys_alone() -> None:
    def rule(path: Path) -> None:
        if floor_of(path) == "store":
            nouns = (
                "bucket|claim|markers|claims|buckets|attempts|counters|ids|ingest|ingests|drain|drains|wake|meta"
                "|retry|dead|dead_topics|held|held_topics|pauses|rate_limits|active|groups|places"
            )
            assert not re.search(rf"""["']({nouns}):?["']""", _code(path))

    assert broken(rule, [p for p in SOURCES if p.name != "keys.py"]) == {}


def _code(path: Path) -> str:
    """The source without docstrings and comments."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    names = {"schedule", "claim", "ack", "release", "retry"}  # script names are verbs; a key is a noun with a tag
    return re.sub("|".join(f"'{name}'" for name in names), "''", ast.unparse(tree))


def test_modules_and_functions_fit_a_screen_or_a_few() -> None:
    def rule(path: Path) -> None:
        text = path.read_text()
        assert text.count("\n") <= LONGER.get(path.name, LINES_MAX)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or 0) - node.lineno < FUNCTION_LINES_MAX, node.name

    assert broken(rule, SOURCES + JOBS + BENCH) == {}


def test_public_things_say_what_they_are() -> None:
    def rule(path: Path) -> None:
        tree = ast.parse(path.read_text())
        if path.name != "__init__.py" or path.parent != PIPELINE:
            assert ast.get_docstring(tree) or not tree.body, "the module"
        for node in tree.body:
            if (
                isinstance(node, ast.ClassDef | ast.FunctionDef)
                and not node.name.startswith("_")
                and node.name != "main"
            ):
                assert ast.get_docstring(node), node.name

    assert broken(rule, SOURCES + JOBS + BENCH) == {}


def test_a_script_documents_exactly_what_it_uses() -> None:
    def rule(path: Path) -> None:
        header = "".join(line for line in path.read_text().splitlines(True) if line.startswith(("--", "#!")))
        body = "".join(line for line in path.read_text().splitlines(True) if not line.startswith("--"))
        for vector in ("KEYS", "ARGV"):
            documented = set(re.findall(rf"^-- {vector}\[(\d+)", header, re.M))
            used = set(re.findall(rf"{vector}\[(\d+)\]", body))
            assert used <= documented, vector
        assert "Returns" in header
        assert header.startswith("#!lua")

    assert broken(rule, SCRIPTS) == {}


def test_an_include_names_what_a_script_has_named_for_it() -> None:
    assert not [path.name for path in INCLUDES if re.search(r"\b(KEYS|ARGV)\b", path.read_text())]


def test_a_script_neither_searches_keys_nor_builds_one() -> None:
    def rule(path: Path) -> None:
        body = path.read_text()
        assert not re.search(r"'(KEYS|SCAN|RANDOMKEY)'", body)
        assert not re.search(r"redis\.call\('(?!X(INFO|GROUP|READGROUP)')\w+', *['\"{]", body), (
            "a key must come from KEYS"
        )

    assert broken(rule, SCRIPTS + INCLUDES) == {}


def test_tests_wait_for_something_and_never_sleep() -> None:
    sleepers = [
        str(path)
        for path in (ROOT / "tests").rglob("*.py")
        if re.search(r"\bsleep\(", path.read_text()) and path != Path(__file__)
    ]
    assert sleepers == []


def test_a_wait_for_nothing_is_no_way_to_sleep() -> None:
    """Take ``tests.waiting.wait_until``, or a ``ManualClock``. These wait for a real or random time, or poll."""
    known = {
        "chaos": {"test_cold_crashes.py", "workload.py"},
        "drain": {"test_side_by_side.py"},
        "e2e": {"test_data_source.py", "test_worker_sockets.py"},
        "kafka": {"campaign.py", "test_loops.py"},
        "runtime": {"test_supervisor.py"},
        "tests": {"test_cli.py", "waiting.py"},
        "web": {"test_outages.py"},
    }
    sleepers = {
        (path.parent.name, path.name)
        for path in (ROOT / "tests").rglob("*.py")
        if re.search(r"\bEvent\(\)\.wait\(", path.read_text())
    }
    assert sleepers == {(folder, name) for folder, names in known.items() for name in names}


def test_property_tests_have_no_deadline() -> None:
    profiles = ("default", tests.examples.IN_CI, tests.examples.EVERYDAY, tests.examples.NIGHTLY)
    assert {name: settings.get_profile(name).deadline for name in profiles} == dict.fromkeys(profiles)
    with_one = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / "tests").rglob("*.py")
        if path != Path(tests.examples.__file__)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and any(argument.arg == "deadline" for argument in node.keywords)
    ]
    assert with_one == [], "tests/examples.py says for all that there is none"


def test_only_the_examples_of_ci_are_the_same_each_time() -> None:
    derandomized = {
        name: settings.get_profile(name).derandomize for name in (tests.examples.IN_CI, tests.examples.NIGHTLY)
    }
    assert derandomized == {tests.examples.IN_CI: True, tests.examples.NIGHTLY: False}


def test_job_names_hide_no_module_of_the_standard_library() -> None:
    import sys

    assert not {path.stem for path in JOBS} & sys.stdlib_module_names


def test_the_architecture_names_every_part() -> None:
    files = {path.stem for path in PIPELINE.glob("*.py")} - {"__init__"}
    parts = files | {
        path.parent.name for path in PIPELINE.glob("*/__init__.py")
    }  # an older checkout leaves empty folders
    assert parts == FLOORS.keys()


def test_the_reading_path_is_read_in_an_afternoon() -> None:
    named = re.findall(r"^\d+\. `(pipeline/.*?)`", ARCHITECTURE, re.M)
    assert len(named) >= 10
    files = [file for name in named for file in ([ROOT / name] if (ROOT / name).is_file() else (ROOT / name).iterdir())]
    lines = sum(file.read_text().count("\n") for file in files if file.suffix in (".py", ".lua"))
    assert lines <= READING_PATH_LINES_MAX


def test_the_docs_have_every_reason_of_a_reject() -> None:
    described = (ROOT / "docs/operations.md").read_text().partition("### Why a line is rejected")[2]
    lines, files = (re.findall(r"^\| (`.*?`) \|", part, re.M) for part in described.split("\n#")[:2])
    sources = "".join(path.read_text() for path in (PIPELINE / "landing").glob("*.py"))
    of_files = set(re.findall(r'(?:UnusableFile|_put_in_quarantine)\([^)"]*"(\w+)"', sources))
    assert len(of_files) >= 7, "they are not found any more"
    assert set(re.findall(r"\w+", " ".join(lines))) == set(Reason)
    assert set(re.findall(r"\w+", " ".join(files))) == of_files


def test_markdown_fits_a_terminal() -> None:
    """Rows of tables and code may be longer: they cannot be wrapped."""
    files = [
        *ROOT.glob("*.md"),
        *(file for folder in ("docs", "bench", "examples") for file in (ROOT / folder).rglob("*.md")),
    ]
    without_code = {
        file: re.sub(
            r"(?ms)^ *```.*?^ *```$", lambda code: "\n" * code[0].count("\n"), file.read_text(encoding="utf-8")
        )
        for file in files
    }
    long = [
        f"{file.relative_to(ROOT)}:{number}"
        for file, text in without_code.items()
        for number, line in enumerate(text.splitlines(), start=1)
        if len(line) > MARKDOWN_LINE_MAX and not line.startswith("|") and "://" not in line
    ]
    assert long == []
