"""Duetime: deliver messages at a future time with Spark and Redis."""

__version__ = "0.1.0"

# The wheel has the same code under another name, so that no top-level module of a program is called pipeline or jobs.
IS_INSTALLED = __name__ == "duetime"
