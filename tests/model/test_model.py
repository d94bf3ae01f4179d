"""The scripts and the store keep their promises in every order of calls; see ``machine``."""

from collections.abc import Iterator

import pytest
from _pytest.mark import ParameterSet
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from pipeline.store import routes, scripts
from pipeline.store.redis_store import RedisStore
from tests.examples import NIGHTLY
from tests.model.machine import StoreMachine
from tests.model.planted import PLANTED, PLANTED_IN_STREAMS, RARE, Planted
from tests.model.storing import WRITERS
from tests.model.streaming import StreamMachine
from tests.servers import RealServer, real_server

# Derandomized but for the night: CI sees the same examples each time, and a planted fault that is found once is found again.
EXAMPLES = 150  # and 60 of them every day
SETTINGS = settings(
    max_examples=EXAMPLES,
    stateful_step_count=40,
    derandomize=settings.get_current_profile_name() != NIGHTLY,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
TO_THE_FIRST_FAILURE = settings(
    SETTINGS, max_examples=4_000, derandomize=True, phases=[Phase.generate], report_multiple_bugs=False
)


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with real_server("--appendonly", "no") as running:
        yield running


@pytest.fixture(autouse=True)
def few_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep so few targets that the script has to look ahead."""
    monkeypatch.setattr(routes, "TARGETS_KEPT", 2)


def machine_on(
    server: RealServer,
    store_type: type[RedisStore] = RedisStore,
    clock_error_ms: int = 0,
    machine_type: type[StoreMachine] = StoreMachine,
) -> type[StoreMachine]:
    """The machine, with the scripts as they read now."""
    loaded = scripts.Scripts()
    loaded.load(server.client())  # a script that does not compile is no planted fault
    chosen = {
        "clients": [server.client() for _ in range(WRITERS)],
        "scripts": loaded,
        "store_type": store_type,
        "clock_error_ms": clock_error_ms,
    }
    return type("Machine", (machine_type,), chosen)


def planted(faults: list[Planted]) -> list[ParameterSet]:
    """The parameters of a test that must find each of these faults."""
    nightly = {True: [pytest.mark.nightly], False: []}
    return [pytest.param(each, id=f"{each.where}: {each.name}", marks=nightly[each.name in RARE]) for each in faults]


def test_what_waits_for_the_night_is_planted() -> None:
    assert {fault.name for fault in (*PLANTED, *PLANTED_IN_STREAMS)} >= RARE


@pytest.mark.parametrize("examples", [60, pytest.param(EXAMPLES, marks=pytest.mark.slow)])
@pytest.mark.parametrize("machine_type", [StoreMachine, StreamMachine])
def test_every_promise_holds(server: RealServer, machine_type: type[StoreMachine], examples: int) -> None:
    run_state_machine_as_test(
        machine_on(server, machine_type=machine_type), settings=settings(SETTINGS, max_examples=examples)
    )


@pytest.mark.planted
@pytest.mark.timeout(400)
@pytest.mark.parametrize("fault", planted(PLANTED))
def test_a_planted_fault_is_found(server: RealServer, monkeypatch: pytest.MonkeyPatch, fault: Planted) -> None:
    monkeypatch.setattr(scripts, "read_script", fault.over(scripts.read_script))
    machine = machine_on(server, fault.store_type())
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=TO_THE_FIRST_FAILURE)


@pytest.mark.planted
@pytest.mark.timeout(400)
@pytest.mark.parametrize("fault", planted(PLANTED_IN_STREAMS))
def test_a_fault_planted_in_streams_is_found(
    server: RealServer, monkeypatch: pytest.MonkeyPatch, fault: Planted
) -> None:
    monkeypatch.setattr(scripts, "read_script", fault.over(scripts.read_script))
    machine = machine_on(server, machine_type=StreamMachine)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=TO_THE_FIRST_FAILURE)


@pytest.mark.planted
@pytest.mark.timeout(400)
@pytest.mark.parametrize("error_ms", [60_000, 1, -1])
def test_a_client_that_trusts_its_own_clock_is_found(server: RealServer, error_ms: int) -> None:
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine_on(server, clock_error_ms=error_ms), settings=TO_THE_FIRST_FAILURE)
