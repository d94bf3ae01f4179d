"""Certificates of an authority of one's own, for servers on this machine that want one of each client, too."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests import servers

DEBIANS = shutil.which("redis-server")  # the bundled server has no TLS
KEY_PASSWORD = "of-the-key-7Kq"
_MAKE = """
openssl req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.crt -days 1 -subj /CN=authority
for name in server client; do
  openssl req -newkey rsa:2048 -nodes -keyout $name.key -out $name.csr -subj /CN=$name
  openssl x509 -req -in $name.csr -CA ca.crt -CAkey ca.key -CAcreateserial -out $name.crt -days 1 \
    -extfile <(echo subjectAltName=DNS:localhost,IP:127.0.0.1)
done
openssl rsa -aes256 -in client.key -out locked.key -passout env:KEY_PASSWORD
"""

needs_tls = pytest.mark.skipif(
    not (DEBIANS and shutil.which("openssl")), reason="there is no redis-server or no openssl"
)


class Certificates:
    """An authority, and a certificate of a server and of a client whose key is locked by a password."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        environ = {"PATH": os.environ["PATH"], "KEY_PASSWORD": KEY_PASSWORD}
        made = subprocess.run(
            ["bash", "-ec", _MAKE], cwd=folder, env=environ, capture_output=True, text=True, check=False
        )
        assert made.returncode == 0, made.stderr

    def of_server(self) -> list[str]:
        """Return the options of a server that lets nobody in without a certificate."""
        files = {"cert-file": "server.crt", "key-file": "server.key", "ca-cert-file": "ca.crt"}
        named = [word for name, file in files.items() for word in (f"--tls-{name}", f"{self.folder}/{file}")]
        return [*named, "--tls-auth-clients", "yes"]

    def of_test(self) -> dict[str, Any]:
        """Return how a test itself connects."""
        files = {"ssl_ca_certs": "ca.crt", "ssl_certfile": "client.crt", "ssl_keyfile": "client.key"}
        return {"ssl": True, **{name: str(self.folder / file) for name, file in files.items()}}

    def of_client(self) -> str:
        """Return the query of a URL that has all of it."""
        files = {"ssl_ca_certs": "ca.crt", "ssl_certfile": "client.crt", "ssl_keyfile": "locked.key"}
        named = [f"{name}={quote(str(self.folder / file))}" for name, file in files.items()]
        return "&".join([*named, f"ssl_password={KEY_PASSWORD}"])


@contextmanager
def debians_server() -> Iterator[None]:
    """Have the servers of the block be Debian's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DUETIME_TEST_SERVER", str(DEBIANS))
        for each in (servers.server_version, servers.users_of_docs):
            each.cache_clear()
        yield
    for each in (servers.server_version, servers.users_of_docs):
        each.cache_clear()
