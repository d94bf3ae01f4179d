"""The asyncio client: the same verbs as the other, over threads."""

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from typing import TypeVar

import pytest

from pipeline.client import AsyncDuetime, Duetime, Request, RequestRefused, State, StoreUnavailable
from pipeline.client.aio_consumer import AsyncConsumer
from pipeline.client.commit import SOURCE_ID, Stored
from pipeline.consume.consumer import Consumer
from pipeline.core.errors import StoreError
from pipeline.core.messages import Message
from tests.client.builders import KEYS, deliver_due
from tests.servers import RealServer

HOUR = timedelta(hours=1)

T = TypeVar("T")


def public(type_: type) -> dict[str, inspect.Signature]:
    return {
        name: inspect.signature(member)
        for name, member in inspect.getmembers(type_, callable)
        if not name.startswith("_")
    }


def test_both_clients_have_the_same_verbs_and_arguments() -> None:
    threads, tasks = public(Duetime), public(AsyncDuetime)
    ours = {
        "schedule",
        "schedule_many",
        "get",
        "cancel",
        "reschedule",
        "replace",
        "get_many",
        "cancel_many",
        "upcoming",
        "run",
        "close",
    }
    assert ours <= threads.keys() & tasks.keys()
    for name in ours - {"run"}:
        assert [*threads[name].parameters.values()] == [*tasks[name].parameters.values()], name
    assert [*threads["run"].parameters] == [*tasks["run"].parameters]
    assert public(AsyncConsumer).keys() <= public(Consumer).keys()


def use(server: RealServer, call: Callable[[AsyncDuetime], Awaitable[T]]) -> T:
    async def main() -> T:
        async with AsyncDuetime(server.url) as duetime:
            return await asyncio.wait_for(call(duetime), 30)

    return asyncio.run(main())


def test_the_verbs_do_what_they_do_in_threads(server: RealServer) -> None:
    async def call(duetime: AsyncDuetime) -> None:
        receipt = await duetime.schedule("tea", delay=HOUR, id="tea")
        assert (await duetime.schedule("tea", delay=HOUR, id="tea")).is_duplicate
        assert (await duetime.get("tea")).message == receipt.message
        assert (await duetime.reschedule("tea", delay=2 * HOUR)).state is State.SCHEDULED
        assert (await duetime.schedule_many(Request(f"{n}", delay=n) for n in range(1_200))).stored == 1_200
        assert len([listed async for listed in duetime.upcoming()]) == 1_201
        assert (await duetime.cancel("tea")).state is State.CANCELLED
        with pytest.raises(RequestRefused):
            await duetime.schedule("", delay=1)

    use(server, call)


def test_calls_that_come_at_once_share_transactions(server: RealServer) -> None:
    async def call(duetime: AsyncDuetime) -> list[str]:
        receipts = await asyncio.gather(
            *(duetime.schedule(f"{n}", delay=HOUR, id=f"id-{n % 900}") for n in range(1_000))
        )
        with server.client() as client:
            [part_id] = client.zrange(KEYS.markers(SOURCE_ID), 0, 0)
            assert int(client.get(KEYS.marker(SOURCE_ID, part_id.decode())) or 0) < 20
        assert [receipt.is_duplicate for receipt in receipts] == [False] * 900 + [True] * 100
        return [listed.id async for listed in duetime.upcoming()]

    assert sorted(use(server, call)) == sorted(f"id-{n}" for n in range(900))


def test_an_error_reaches_every_caller_and_the_next_call_works(server: RealServer) -> None:
    async def call(duetime: AsyncDuetime) -> None:
        with server.client() as client:
            client.config_set("maxmemory", 1)
            try:
                calls = (duetime.schedule(f"{n}", delay=HOUR) for n in range(10))
                errors = await asyncio.gather(*calls, return_exceptions=True)
            finally:
                client.config_set("maxmemory", 0)
        assert [isinstance(error, StoreUnavailable) for error in errors] == [True] * 10
        assert (await duetime.schedule("then", delay=HOUR)).state is State.SCHEDULED

    async def main() -> None:
        async with AsyncDuetime(server.url, patience_sec=0.1) as duetime:
            await call(duetime)

    asyncio.run(main())


def test_an_error_before_anything_is_tried_reaches_every_caller_and_the_next_call_works(
    server: RealServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def call(duetime: AsyncDuetime) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(duetime, "try_all", None)  # as if the thread could not be started
            calls = (duetime.schedule(f"{n}", delay=HOUR) for n in range(3))
            errors = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(error) for error in errors] == [TypeError] * 3
        assert (duetime.waiting_messages, duetime.waiting_characters) == (0, 0)
        assert (await duetime.schedule("then", delay=HOUR)).state is State.SCHEDULED

    use(server, call)


def test_a_client_that_is_closed_says_so_at_once_and_may_be_closed_again(server: RealServer) -> None:
    async def main() -> None:
        duetime = await AsyncDuetime(server.url).__aenter__()
        late = asyncio.create_task(duetime.schedule("on its way", delay=HOUR, id="way"))
        while not duetime.waiting_messages:
            await asyncio.to_thread(str)
        await duetime.close()
        await duetime.close()
        assert (await late).state is State.SCHEDULED
        for call in (duetime.schedule("tea", delay=1), duetime.get("tea"), duetime.cancel("tea")):
            with pytest.raises(RuntimeError, match="This AsyncDuetime is closed: open another one"):
                await asyncio.wait_for(call, 30)

    asyncio.run(main())


def test_when_storing_is_cancelled_so_is_every_call_that_waits_for_it(
    server: RealServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def call(duetime: AsyncDuetime) -> None:
        begun, over = threading.Event(), threading.Event()

        def try_all(messages: list[Message]) -> list[Stored | StoreError]:
            begun.set()
            over.wait(60)
            return []

        monkeypatch.setattr(duetime, "try_all", try_all)
        late = asyncio.create_task(duetime.schedule("tea", delay=HOUR))
        await asyncio.to_thread(begun.wait, 20)
        assert duetime._committing
        duetime._committing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(late, 20)
        over.set()

    use(server, call)


@pytest.fixture
def mail(server: RealServer) -> Iterator[Callable[[int], None]]:
    """Something that delivers so many messages into a stream."""
    with Duetime(server.url) as duetime:

        def send(count: int) -> None:
            duetime.schedule_many(Request(f"{n}", delay=0, topic="mail") for n in range(count))
            deliver_due(server)

        yield send


def test_messages_are_iterated_and_a_wait_that_is_cancelled_loses_none(
    server: RealServer, mail: Callable[[int], None]
) -> None:
    async def call(duetime: AsyncDuetime) -> None:
        async with duetime.consume("mail", "billing") as consumer:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(consumer), 0.1)
            await asyncio.to_thread(mail, 3)
            found = []
            async for message in consumer:
                found.append(message.body)
                assert await consumer.ack(message)
                if len(found) == 3:
                    break
            assert found == ["0", "1", "2"]

    use(server, call)


def test_a_consumer_goes_on_after_an_error(server: RealServer, mail: Callable[[int], None]) -> None:
    async def call(duetime: AsyncDuetime) -> None:
        async with duetime.consume("mail", "billing") as consumer:
            await asyncio.to_thread(mail, 1)
            client, key = server.client(), KEYS.groups("mail")
            client.rename(key, "aside")
            client.set(key, "something else")
            with pytest.raises(StoreError):
                await anext(consumer)
            client.rename("aside", key)
            assert (await asyncio.wait_for(anext(consumer), 20)).body == "0"

    use(server, call)


def test_a_handler_is_awaited_for_many_messages_at_once(server: RealServer, mail: Callable[[int], None]) -> None:
    async def call(duetime: AsyncDuetime) -> None:
        at_once, all_there, handled = 0, asyncio.Event(), []

        async def handle(message: Message) -> None:
            nonlocal at_once
            at_once += 1
            if at_once == 4:
                all_there.set()
            await all_there.wait()
            handled.append(message.body)

        run = asyncio.create_task(duetime.run("mail", "billing", handle, concurrency=4, start="beginning"))
        await asyncio.to_thread(mail, 4)
        async with asyncio.timeout(20):
            await all_there.wait()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert sorted(handled) == ["0", "1", "2", "3"]

    use(server, call)
