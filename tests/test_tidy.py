"""The house rules that a machine can hold."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PIPELINE = ROOT / "pipeline"
SOURCES = sorted(PIPELINE.rglob("*.py"))
JOBS = sorted((ROOT / "jobs").glob("*.py"))
BENCH = sorted((ROOT / "bench").glob("*.py"))
SCRIPTS = sorted((PIPELINE / "store" / "lua").glob("*.lua"))
LINES_MAX, FUNCTION_LINES_MAX = 310, 75

# What a folder (or module) of pipeline/ may import of the others, itself aside.
FLOORS = {
    "core": set(),
    "config": {"core"},
    "store": {"core", "config"},
    "sinks": {"core"},
    "landing": {"core"},
    "runtime": {"core", "config"},
    "ingest": {"core", "config", "store", "landing"},
    "drain": {"core", "config", "store", "sinks"},
    "consume": {"core", "config", "store"},
    "cli": {"core", "config", "runtime"},
}
# The only places for some libraries.
HOMES = {
    "redis": {"store"},
    "pyspark": {"ingest"},
    "pyarrow": {"ingest"},
    "numpy": {"ingest"},
    "inotify_simple": {"landing"},
    "tqdm": {"ingest"},
    "prometheus_client": {"drain"},
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


def identifiers(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


@pytest.mark.parametrize("path", SOURCES, ids=identifiers(SOURCES))
def test_a_module_imports_only_from_the_floors_below(path: Path) -> None:
    floor = floor_of(path)
    if floor == "__init__":
        return
    ours = {name.split(".")[1] for name in imports_of(path) if name.startswith("pipeline.")}
    assert ours - FLOORS[floor] - {floor} == set()


@pytest.mark.parametrize("path", SOURCES, ids=identifiers(SOURCES))
def test_libraries_stay_where_they_belong(path: Path) -> None:
    libraries = {name.split(".")[0] for name in imports_of(path)}
    strangers = {library for library in libraries & HOMES.keys() if floor_of(path) not in HOMES[library]}
    assert strangers == set()


def test_core_uses_the_standard_library_alone() -> None:
    import sys

    for path in (PIPELINE / "core").glob("*.py"):
        roots = {name.split(".")[0] for name in imports_of(path)}
        assert roots <= sys.stdlib_module_names | {"pipeline"}, path


@pytest.mark.parametrize("path", SOURCES, ids=identifiers(SOURCES))
def test_only_clock_reads_a_clock(path: Path) -> None:
    if (
        path == PIPELINE / "core" / "clock.py" or floor_of(path) == "runtime"
    ):  # set-up measures itself, before core is there
        return
    calls = re.findall(
        r"\b(?:time\.(?:time|monotonic|sleep)\w*|datetime\.(?:now|utcnow)|date\.today)\(", path.read_text()
    )
    assert calls == []


@pytest.mark.parametrize("path", [p for p in SOURCES if p.name != "keys.py"])
def test_key_text_is_in_keys_alone(path: Path) -> None:
    if floor_of(path) == "store":
        nouns = (
            "bucket|claim|fences|claims|buckets|attempts|counters|ids|ingest|ingests|drain|drains|wake|layout"
            "|again|dead|held|pauses|paces|active"
        )
        assert not re.search(rf"""["']({nouns}):?["']""", _code(path))


def _code(path: Path) -> str:
    """The source without docstrings and comments."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    names = {"schedule", "claim", "ack", "release", "again"}  # script names are verbs; a key is a noun with a tag
    return re.sub("|".join(f"'{name}'" for name in names), "''", ast.unparse(tree))


@pytest.mark.parametrize("path", SOURCES + JOBS + BENCH, ids=identifiers(SOURCES + JOBS + BENCH))
def test_modules_and_functions_fit_a_screen_or_a_few(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= LINES_MAX
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno < FUNCTION_LINES_MAX, node.name


@pytest.mark.parametrize("path", SOURCES + JOBS + BENCH, ids=identifiers(SOURCES + JOBS + BENCH))
def test_public_things_say_what_they_are(path: Path) -> None:
    tree = ast.parse(path.read_text())
    if path.name != "__init__.py" or path.parent != PIPELINE:
        assert ast.get_docstring(tree) or not tree.body, "the module"
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_") and node.name != "main":
            assert ast.get_docstring(node), node.name


@pytest.mark.parametrize("path", SCRIPTS, ids=[path.name for path in SCRIPTS])
def test_a_script_documents_exactly_what_it_uses(path: Path) -> None:
    header = "".join(line for line in path.read_text().splitlines(True) if line.startswith(("--", "#!")))
    body = "".join(line for line in path.read_text().splitlines(True) if not line.startswith("--"))
    for vector in ("KEYS", "ARGV"):
        documented = set(re.findall(rf"^-- {vector}\[(\d+)", header, re.M))
        used = set(re.findall(rf"{vector}\[(\d+)\]", body))
        assert used <= documented, vector
    assert "Returns" in header
    assert header.startswith("#!lua")


@pytest.mark.parametrize("path", SCRIPTS, ids=[path.name for path in SCRIPTS])
def test_a_script_neither_searches_keys_nor_builds_one(path: Path) -> None:
    body = path.read_text()
    assert not re.search(r"'(KEYS|SCAN|RANDOMKEY)'", body)
    assert not re.search(r"redis\.call\('(?!X(INFO|GROUP|READGROUP)')\w+', *['\"{]", body), "a key must come from KEYS"


def test_tests_wait_for_something_and_never_sleep() -> None:
    sleepers = [
        str(path)
        for path in (ROOT / "tests").rglob("*.py")
        if re.search(r"\bsleep\(", path.read_text()) and path != Path(__file__)
    ]
    assert sleepers == []


def test_job_names_hide_no_module_of_the_standard_library() -> None:
    import sys

    assert not {path.stem for path in JOBS} & sys.stdlib_module_names
