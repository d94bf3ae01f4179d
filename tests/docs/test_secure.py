"""docs/how-to/secure.md, TLS with an authority of one's own and a token, on Debian's Redis, as the bundled server has no TLS;
and the users of docs/operations.md, on both servers.
"""

import hashlib
import re
import shutil
import socket
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from pipeline.config import ROOT
from tests.docs.pages import blocks_of, run_here
from tests.docs.terminal import Terminals
from tests.ports import free_port
from tests.servers import real_server, server_version, user_rights
from tests.tls import debians_server
from tests.waiting import wait_until

Server = Callable[[], AbstractContextManager[None]]

PAGE = "docs/how-to/secure.md"
AUTHORITY = """
openssl req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.crt -days 1 -subj /CN=authority
openssl req -newkey rsa:2048 -nodes -keyout server.key -out server.csr -subj /CN=localhost
openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -out server.crt -days 1 \
  -extfile <(echo subjectAltName=DNS:localhost)
"""

pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, ("redis-server", "openssl"))), reason="there is no redis-server or no openssl here"
)


def test_the_jobs_reach_redis_by_tls_and_verify_who_it_is(terminals: Terminals) -> None:
    reaching, by_file, token = run_here(PAGE, __file__)
    terminals.type(AUTHORITY)
    port = free_port()
    rights = [right for right in user_rights() if right not in ("+waitaof", "+client|setinfo")]  # Debian's may be 7.0
    options = ["--tls-port", str(port), "--port", "0", "--bind", "127.0.0.1", "--save", "", "--tls-auth-clients", "no"]
    files = ["--tls-cert-file", "server.crt", "--tls-key-file", "server.key", "--tls-ca-cert-file", "ca.crt"]
    users = ["--user", "default", "off", "--user", "duetime", "on", ">another-long-password", *rights]
    server = subprocess.Popen(
        ["redis-server", *options, *files, *users],
        cwd=terminals.root,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(port, server)
        export, *commands = [command for command, _ in reaching.commands()]
        told = terminals.type("\n".join((f"PORT={port}", export, *commands)))
        assert "message  tea is ready" in told
        hidden = [command for command, _ in by_file.commands()]
        assert "message  tea is ready" in terminals.type("\n".join((f"PORT={port}", export, *hidden)))
        assert Path(terminals.root, "redis-url").stat().st_mode & 0o777 == 0o600
        for wrong in (export.replace("?ssl_ca_certs=ca.crt", ""), export.replace("another-long", "a-short")):
            with pytest.raises(AssertionError, match=r"certificate verify failed|refuses the user or password"):
                terminals.type("\n".join((f"PORT={port}", wrong, commands[-1])))
    finally:
        server.kill()
        server.wait()
    secret = terminals.type("\n".join([*(command for command, _ in token.commands()), 'printf %s "$TOKEN"']))
    expected = f"shop {hashlib.sha256(secret.encode()).hexdigest()} schedule\n"
    assert Path(terminals.root, "tokens").read_text() == expected


@pytest.mark.skipif(not shutil.which("redis-cli"), reason="there is no redis-cli here")
@pytest.mark.parametrize("of_server", [debians_server, nullcontext], ids=["debian", "bundled"])
def test_the_users_of_the_page_are_made_by_its_command(tmp_path: Path, of_server: Server) -> None:
    [block] = run_here("docs/operations.md", __file__)
    [(command, _)] = block.commands()
    *first, additions = [
        each.text for each in blocks_of(ROOT / "docs/operations.md") if each.run_by.endswith("servers.py")
    ]
    users = re.findall(r"^ACL SETUSER (\w+) on", "".join(first), re.M)
    assert re.findall(r"^ACL SETUSER (\w+) ", additions, re.M) == users
    with of_server(), real_server() as server:
        blocks = [*first, additions] if server_version() >= (7, 2) else first
        (tmp_path / "users.txt").write_text("".join(blocks))
        typed = command.replace('-u "$REDIS_URL"', f"-s {server.folder}/s")
        said = subprocess.run(["bash", "-c", typed], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        assert said.split() == ["OK"] * "".join(blocks).count("ACL SETUSER")
        made = {user.split()[1]: user.split() for user in server.client().acl_list()}
    rights = [made[user] for user in users]
    assert all(("+client|setinfo" in each) == (len(blocks) > len(first)) for each in rights)


def wait_for(port: int, server: "subprocess.Popen[bytes]") -> None:
    def answers() -> bool:
        assert server.poll() is None, "the server ended at once"
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    wait_until(answers, "the server answers")
