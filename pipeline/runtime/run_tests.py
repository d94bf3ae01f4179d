"""What ``tests/run.sh`` runs: pytest, in an environment where Spark starts."""

import os
import sys

from pipeline.core.errors import ConfigError
from pipeline.runtime.submit import spark_environ

if __name__ == "__main__":
    try:
        environ = os.environ | spark_environ(os.environ)
    except ConfigError as error:
        sys.exit(str(error))
    environ |= {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
    environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.execve(sys.executable, [sys.executable, "-P", "-m", "pytest", *sys.argv[1:]], environ)
