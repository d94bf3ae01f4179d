"""Builds the wheel: the code of pipeline/ and jobs/ as the package duetime, so that no program gets a module called pipeline."""

import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

OURS = re.compile(r"^(\s*(?:from|import) )(pipeline|jobs)(?=[.\s])", re.MULTILINE)
NAMES = {"pipeline": "duetime", "jobs": "duetime.jobs"}
NOT_PACKED = shutil.ignore_patterns(
    "__pycache__", "bootstrap.py", "run_tests.py", "submit.py", "supervisor.py", "dashboard.py"
)


class CustomBuildHook(BuildHookInterface[Any]):
    """Copies the code under its other name, and has the copy packed."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Make the copy."""
        self._folder = Path(tempfile.mkdtemp())
        package = self._folder / "duetime"
        root = Path(self.root)
        shutil.copytree(root / "pipeline", package, ignore=NOT_PACKED)
        shutil.copytree(root / "jobs", package / "jobs", ignore=NOT_PACKED)
        (package / "jobs" / "__init__.py").touch()
        for path in package.rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            path.write_text(OURS.sub(lambda found: found[1] + NAMES[found[2]], text), encoding="utf-8")
        with open(package / "__init__.py", "a", encoding="utf-8") as file:
            file.write(
                "\nfrom duetime.client import *  # noqa: E402, F403\nfrom duetime.client import __all__ as __all__  # noqa: E402\n"
            )
        build_data["force_include"][str(package)] = "duetime"
        build_data["pure_python"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the copy."""
        shutil.rmtree(self._folder)
