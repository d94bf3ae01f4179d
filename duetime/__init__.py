"""The import name ``duetime`` in a checkout; the wheel has a package of this name instead (hatch_build.py).

``duetime.x`` is the module ``pipeline.x`` itself, and ``duetime.jobs.x`` is ``jobs.x``: each class exists once, so an exception
that is raised under one name is caught under the other, and what is pickled under one is read under the other.
"""

import sys
from collections.abc import Sequence
from importlib import import_module, util
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

from pipeline import __version__ as __version__
from pipeline.client import *  # noqa: F403
from pipeline.client import __all__ as __all__


def _name_in_checkout(name: str) -> str:
    inner = name.removeprefix(f"{__name__}.")
    return inner if inner.partition(".")[0] == "jobs" else f"pipeline.{inner}"


class _Alias(MetaPathFinder, InspectLoader):
    """Imports the module of the checkout, and enters it under the asked name as well."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        found = util.find_spec(_name_in_checkout(fullname)) if fullname.startswith(f"{__name__}.") else None
        if found is None:
            return None
        is_package = found.submodule_search_locations is not None
        return ModuleSpec(fullname, self, origin=found.origin, is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        # What is found there after this call is what the importer gets.
        sys.modules[module.__name__] = import_module(_name_in_checkout(module.__name__))

    def get_code(self, fullname: str) -> CodeType | None:
        """Return what ``python -m`` runs."""
        found = util.find_spec(_name_in_checkout(fullname))
        return found.loader.get_code(found.name) if found and isinstance(found.loader, InspectLoader) else None

    def get_source(self, fullname: str) -> str | None:
        """Return nothing: tracebacks read the file of the code."""


sys.meta_path.insert(0, _Alias())
