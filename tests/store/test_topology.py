"""Which node of a cluster is asked, and which URLs there are; tests/scale has real clusters."""

from typing import Any

import pytest
import redis

from pipeline.config import RedisSettings
from pipeline.store.checks import find_cluster
from pipeline.store.topology import MAP_MS, Address, ClusterMap, cluster_url, seeds_of
from tests.clock import ManualClock

A, B, C = ("a", 1), ("b", 2), ("c", 3)


class Nodes(ClusterMap):
    """A map whose nodes say what a test tells."""

    def __init__(self, **says: list[tuple[int, int, list[Address]]] | None) -> None:
        super().__init__([A, B], {}, is_tls=False)
        self.says, self.asked = says, []  # type: ignore[var-annotated]
        self._clock: Any = ManualClock()

    def _slots(self, address: Address) -> list[tuple[int, int, list[Address]]]:
        self.asked.append(address[0])
        if (said := self.says.get(address[0])) is None:
            raise redis.exceptions.ConnectionError("refused")
        return said

    def pass_ms(self, ms: float) -> None:
        self._clock.advance_ms(ms)


def whole(master: Address, *replicas: Address) -> list[tuple[int, int, list[Address]]]:
    return [(0, 16_383, [master, *replicas])]


def test_what_was_said_is_believed_for_a_moment() -> None:
    nodes = Nodes(a=whole(A))
    assert [nodes.master_of(slot) for slot in (0, 5, 16_383)] == [A] * 3
    assert nodes.asked == ["a"]
    nodes.pass_ms(MAP_MS)
    assert nodes.master_of(0) == A
    assert nodes.asked == ["a", "a"]


def test_a_node_that_does_not_answer_or_knows_nothing_is_passed_over() -> None:
    assert Nodes(b=whole(C)).master_of(7) == C
    assert Nodes(a=[], b=whole(C)).master_of(7) == C
    nodes = Nodes(b=whole(C, B))
    assert nodes.nodes() == [B, C], "who answered is asked first the next time"


def test_a_node_that_is_cut_off_from_the_others_is_not_asked_for_ever() -> None:
    """It goes on to say that a master has the slot which is dead, or no longer one."""
    nodes = Nodes(a=whole(C, A, B), b=whole(B, A))
    assert nodes.master_of(0) == C
    nodes.look_elsewhere()
    nodes.pass_ms(MAP_MS)
    found = nodes.master_of(0)
    for _ in range(2):  # C, which is dead, is among the nodes that it knows of
        nodes.look_elsewhere()
        nodes.pass_ms(MAP_MS)
        found = nodes.master_of(0)
    assert found == B


def test_a_slot_that_nobody_has_is_no_answer_and_the_others_are_found() -> None:
    nodes = Nodes(a=[(100, 200, [A])])
    assert nodes.master_of(150) == A
    assert nodes.nodes() == [A]
    with pytest.raises(redis.exceptions.ConnectionError, match="no master of the cluster has slot 0"):
        nodes.master_of(0)


def test_no_node_that_answers_is_told_with_the_reasons() -> None:
    with pytest.raises(redis.exceptions.ConnectionError, match=r"no node .* \(a:1: refused; b:2: refused\)"):
        Nodes().master_of(0)


@pytest.mark.parametrize(
    ("url", "addresses", "options", "path"),
    [
        ("redis+cluster://a,b:7", [("a", 6379), ("b", 7)], {}, ""),
        ("redis+cluster://u:p%40@a:1/0", [("a", 1)], {"username": "u", "password": "p@"}, "0"),
        ("redis+cluster://[::1]:5,b?socket_timeout=3", [("::1", 5), ("b", 6379)], {"socket_timeout": 3.0}, ""),
        (
            "redis+cluster://u:p@a?ssl_ca_certs=/x@y/c",
            [("a", 6379)],
            {"username": "u", "password": "p", "ssl_ca_certs": "/x@y/c"},
            "",
        ),
        ("redis+sentinel://a,b:7/main/2", [("a", 26379), ("b", 7)], {}, "main/2"),
        ("redis+sentinel://a/m?sentinel_password=x", [("a", 26379)], {"sentinel_password": "x"}, "m"),
    ],
)
def test_a_url_of_several_servers_is_read(
    url: str, addresses: list[Address], options: dict[str, Any], path: str
) -> None:
    assert seeds_of(url) == (addresses, options, path)


def test_the_url_of_one_node_becomes_that_of_all() -> None:
    made = cluster_url("rediss://u:p%40@a:1/0?ssl_ca_certs=/ca", [A, ("::1", 5)])
    assert made == "rediss+cluster://u:p%40@a:1,[::1]:5/?ssl_ca_certs=/ca"
    addresses, options, path = seeds_of(made)
    assert (addresses, path, options["ssl_ca_certs"], options["password"]) == ([A, ("::1", 5)], "", "/ca", "p@")


def test_the_url_of_one_node_with_a_path_in_its_query_becomes_that_of_all() -> None:
    assert cluster_url("rediss://u@a?ssl_ca_certs=/x@y", [A]) == "rediss+cluster://u@a:1/?ssl_ca_certs=/x@y"


def test_a_server_that_is_away_is_no_cluster_until_its_check_says_so() -> None:
    settings = RedisSettings(url="redis://127.0.0.1:1/0")
    assert find_cluster(settings) is settings
