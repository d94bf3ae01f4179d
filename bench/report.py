"""Write the tables of the kept results into bench/README.md, between their markers: no figure there is typed by hand."""

import importlib
import re
from textwrap import fill

from bench.common import ROOT, Options, load_result

WIDTH = 100  # as all Markdown here
README = ROOT / "bench" / "README.md"
_MARKED = re.compile(r"(<!-- (\w+): .*?-->\n).*?(<!-- end -->)", re.DOTALL)


def run(options: Options) -> str:
    """Bring the README up to date and say what it shows now."""
    text = README.read_text(encoding="utf-8")
    README.write_text(
        fill_markers(text, {name: _table(name) for _, name, _ in _MARKED.findall(text)}), encoding="utf-8"
    )
    return f"{README.relative_to(ROOT)} shows what is in bench/results/."


def fill_markers(text: str, tables: dict[str, str]) -> str:
    """Replace what stands between ``<!-- name: … -->`` and ``<!-- end -->`` by the table of that name."""
    return _MARKED.sub(lambda match: f"{match[1]}\n{tables[match[2]]}\n\n{match[3]}", text)


def _table(name: str) -> str:
    result = load_result(name)
    if result is None:
        return f"Not measured yet: `bench/run.sh {name}`, then `bench/run.sh report`."
    text = str(importlib.import_module(f"bench.{name}").tables(result))
    return "\n".join(
        line if line.startswith("|") else fill(line, WIDTH, break_on_hyphens=False) for line in text.splitlines()
    )
