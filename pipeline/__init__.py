"""Duetime: deliver messages at a future time with Spark and Redis."""

__version__ = "0.1.0"
