# For type checkers, which read files: at run time this name is the module pipeline.spark.
from pipeline.spark import *  # noqa: F403
