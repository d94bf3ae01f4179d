"""The commands of docs/topics.md, typed one after the other beside a drain loop."""

import signal

import pytest

from pipeline.store.keys import Keys
from tests.docs.pages import run_here
from tests.docs.terminal import Terminals
from tests.servers import RealServer

pytestmark = pytest.mark.timeout(240)


def test_the_commands_and_the_consumer_of_the_page_work(terminals: Terminals, server: RealServer) -> None:
    terminals.environ["REDIS_URL"] = server.url
    reading, dropping, code, running, *others = run_here("docs/topics.md", __file__)
    loop = terminals.start("./spark-submit.sh jobs/drain.py")
    loop.wait_for(lambda _: bool(server.client().exists(Keys("duetime").drains())), "heartbeat")
    (set_sink, _), (consume, _) = reading.commands()
    terminals.type(set_sink)
    consumer = terminals.start(consume)
    consumer.wait_for_line("registered the group billing")
    terminals.type("./spark-submit.sh jobs/schedule.py hello --in 0s --topic mail")
    consumer.wait_for_line("hello")
    assert consumer.stop(signal.SIGINT) == 0
    terminals.type(dropping.commands()[0][0])
    (terminals.root / "my.py").write_text(code.text.replace("print(message.body)", "print(message.body, flush=True)"))
    program = terminals.start(running.commands()[0][0])
    program.wait_for(lambda _: "billing" in terminals.type("./spark-submit.sh jobs/topics.py groups"), "group")
    terminals.type("./spark-submit.sh jobs/schedule.py world --in 0s --topic mail")
    program.wait_for_line("world")
    assert program.stop(signal.SIGINT) == 0
    for block in others:
        for command, _ in block.commands():
            terminals.type(command)
    assert loop.stop(signal.SIGINT) == 0
