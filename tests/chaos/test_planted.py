"""The checks of ``faults`` notice what they are there for: each protection, taken out, is missed by some of them.

A mutant is a text that is replaced in a script or in a function, for a writer of this process. The server and the checks are the
real ones.
"""

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from pipeline.core.errors import StoreProtocolError
from pipeline.ingest import writer
from pipeline.ingest.shard_writer import ShardWriter
from pipeline.ingest.transactions import PartQueue, Step
from pipeline.ingest.writer import BatchWriter
from pipeline.store import schedule, scripts
from pipeline.store.redis_store import RedisStore
from tests.chaos import faults
from tests.chaos.faults import Check
from tests.chaos.rig import Rig

pytestmark = [
    pytest.mark.planted,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

READ_SCRIPT = scripts.read_script

SCRIPT = "schedule"
WATCHING, STORING, TRANSACTING = ((schedule, name) for name in ("watch", "_store", "transact"))
CONNECTION = (RedisStore, "_connection")
MARKER_AT = (PartQueue, "marker_at")
RESUME = (PartQueue, "place_behind")
LOOK_AGAIN = (ShardWriter, "_look_again")
STORE = (ShardWriter, "store")
WRITER_RESUME = (ShardWriter, "_resume")

WATCHED = 'frame_command("WATCH", *marker_keys)'
COMPARED = "if markers != [move.before for move in transaction.moves]:"
MOVES = "sum(((keys.marker(source_id, move.part_id), move.after) for move in transaction.moves), ())"
MOVE_MARKERS = f"connection.send_command('MSET', *{MOVES}); connection.read_response(); "
RESULT = "return transact(connection, commands)"
MARKER_MOVED = "redis.call('SET', KEYS[FIRST_MARKER + move], ARGV[FIRST_MOVE + 2 * move + 1])"
NOTHING = "redis.call('DBSIZE')"
FOUND = "bisect_right(self.line_nos, line_no, first, last)"
LAST_STORED = "{self.due_ms[place - 1]} {self.line_nos[place - 1]:08x}"
TAKEN_FOR_STORED = """try:
            done = self._store_step(step, queues)
        except Exception:
            step.advance()
            continue"""

Target = str | tuple[Any, str]


@dataclass(frozen=True)
class Mutant:
    """A protection taken out, ``changes`` being old and new text by script or function, and the checks that must fail then."""

    name: str
    noticed_by: tuple[Check, ...]
    changes: dict[Target, tuple[tuple[str, str], ...]]
    shards: int = 1


MUTANTS = (
    Mutant(
        "no marker is watched",
        (faults.overtaken_before_storing, faults.overtaken_in_part),
        {WATCHING: ((WATCHED, 'frame_command("PING")'),)},
    ),
    Mutant(
        "one marker of many is watched",
        (faults.overtaken_at_one_file_of_many,),
        {WATCHING: ((WATCHED, 'frame_command("WATCH", marker_keys[0])'),)},
    ),
    Mutant(
        "markers are read before they are watched",
        (faults.overtaken_before_watching,),
        {
            WATCHING: (
                (f'{WATCHED}, frame_command("MGET", *marker_keys)', f'frame_command("MGET", *marker_keys), {WATCHED}'),
                ("    connection.read_response()\n    markers", "    markers"),
                (COMPARED, f"connection.read_response()\n    {COMPARED}"),
            )
        },
    ),
    Mutant(
        "markers are not compared",
        (
            faults.replayed_when_delivered,
            faults.replayed_when_ids_are_forgotten,
            faults.replies_lost,
            faults.overtaken_before_reading,
            faults.overtaken_when_stored,
        ),
        {WATCHING: ((COMPARED, "if False:"),)},
    ),
    Mutant(
        "one marker of many is compared",
        (faults.one_file_of_many_is_known,),
        {WATCHING: ((COMPARED, "if markers[0] != transaction.moves[0].before:"),)},
    ),
    Mutant("the marker never moves", (faults.nothing_happens,), {SCRIPT: ((MARKER_MOVED, NOTHING),)}),
    Mutant(
        "the marker moves in a step before",
        (faults.commands_lost, faults.each_refused_once, faults.crashed_and_cut_elsewhere),
        {
            SCRIPT: ((MARKER_MOVED, NOTHING),),
            WATCHING: ((WATCHED, 'frame_command("PING")'),),
            STORING: (("commands = [", f"{MOVE_MARKERS}commands = ["),),
        },
    ),
    Mutant(
        "the marker moves in a step behind",
        (faults.replies_lost, faults.server_killed_after_storing),
        {
            SCRIPT: ((MARKER_MOVED, NOTHING),),
            STORING: ((RESULT, f"known = transact(connection, commands); {MOVE_MARKERS}return known"),),
        },
    ),
    Mutant(
        "the marker is one message too far",
        (faults.crashed_at_every_transaction, faults.replies_lost),
        {MARKER_AT: ((LAST_STORED, "{self.due_ms[place]} {self.line_nos[place]:08x}"),)},
    ),
    Mutant(
        "the marker is one message short",
        (faults.crashed_at_every_transaction, faults.replies_lost),
        {MARKER_AT: ((LAST_STORED, LAST_STORED.replace("place - 1", "max(place - 2, 0)")),)},
    ),
    Mutant(
        "the message at the marker is stored again",
        (faults.crashed_at_every_transaction, faults.replies_lost),
        {RESUME: ((FOUND, f"{FOUND} - 1"),)},
    ),
    Mutant(
        "what is due with the message at the marker counts as stored",
        (faults.crashed_twice_and_cut_elsewhere,),
        {RESUME: ((FOUND, "last"),)},
    ),
    Mutant(
        "messages that are due together have another order",
        (faults.crashed_twice_and_cut_elsewhere,),
        {(PartQueue, "__init__"): (("lexsort((part.line_nos,", "lexsort((-part.line_nos,"),)},
    ),
    Mutant(
        "parts of a file share a marker",
        (faults.nothing_happens,),
        {(writer, "parse_file"): (('f"{file.token}.{first_line}", end', "file.token, end"),)},
    ),
    Mutant(
        "idempotency keys are not remembered",
        (faults.nothing_happens,),
        {STORING: (("frame_places(hot_identified, keys.places())", 'frame_command("PING")'),)},
    ),
    Mutant(
        "an idempotency key is remembered by the shard of its file",
        (faults.nothing_happens,),
        {(writer, "split_by_shard"): (("= shard_of(key.decode(), shards)", "= own"),)},
        shards=3,
    ),
    Mutant(
        "a transaction that was dropped counts as stored",
        (faults.overtaken_at_one_file_of_many,),
        {TRANSACTING: (("if replies is None:\n        return None", "if replies is None:\n        return []"),)},
    ),
    Mutant(
        "errors within a transaction are overlooked",
        (faults.a_key_in_the_way,),
        {TRANSACTING: (("if isinstance(reply, Exception):", "if False:"),)},
    ),
    Mutant(
        "the marker moves past what could not be stored",
        (faults.a_key_in_the_way,),
        {SCRIPT: (("  redis.call('ZCARD', KEYS[first_bucket + bucket])\n", ""),)},
    ),
    Mutant(
        "an error counts as stored",
        (faults.commands_lost, faults.server_full),
        {STORE: (("done = self._retrying(partial(self._store_step, step, queues))", TAKEN_FOR_STORED),)},
    ),
    Mutant(
        "a connection is used again after an error",
        (faults.refused_bit_by_bit,),
        {CONNECTION: (("        connection.disconnect()\n", ""),)},
    ),
    Mutant(
        "what is known after a lost reply counts twice",
        (faults.replies_lost,),
        {WRITER_RESUME: (("queue.resume(marker) - before", "queue.resume(marker)"),)},
    ),
    Mutant(
        "rejects are counted with every transaction",
        (faults.nothing_happens,),
        {(Step, "transaction"): ((" if end == len(queue)),", "),"),)},
    ),
    Mutant(
        "the markers are not read again at the end",
        (faults.server_lost_its_last_writes,),
        {LOOK_AGAIN: (("sum(marker != ALL_STORED for marker in markers)", "0"),)},
    ),
    Mutant(
        "a batch that the server lost is not stored again",
        (faults.server_lost_its_last_writes,),
        {(BatchWriter, "__call__"): (("while done.lost or not", "while not"),)},
    ),
)


def plant(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    for target, replacements in mutant.changes.items():
        source = faulty_text(target, replacements)
        if isinstance(target, str):
            monkeypatch.setattr(
                scripts, "read_script", lambda name, t=target, s=source: s if name == t else READ_SCRIPT(name)
            )
        else:
            owner, name = target
            made: dict[str, Any] = {}
            exec(source, function_at(target).__globals__, made)
            monkeypatch.setattr(owner, name, made[name])


def faulty_text(target: Target, replacements: tuple[tuple[str, str], ...]) -> str:
    """Return the source of a script or a function with its changes."""
    source = READ_SCRIPT(target) if isinstance(target, str) else inspect.getsource(function_at(target))
    return replaced(source if isinstance(target, str) else textwrap.dedent(source), replacements)


def function_at(target: tuple[Any, str]) -> Any:
    found = getattr(*target)
    return found.fget if isinstance(found, property) else inspect.unwrap(found)


def replaced(source: str, replacements: tuple[tuple[str, str], ...]) -> str:
    for old, new in replacements:
        assert source.count(old) == 1, f"the pipeline has changed: {old!r} is not in it once"
        source = source.replace(old, new)
    return source


PLANTED = [(mutant, check) for mutant in MUTANTS for check in mutant.noticed_by]


@pytest.mark.parametrize(
    ("mutant", "check"), PLANTED, ids=[f"{mutant.name}-{check.__name__}" for mutant, check in PLANTED]
)
def test_a_planted_fault_is_noticed(
    mutant: Mutant, check: Check, open_rig: Callable[[int], Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(mutant, monkeypatch)
    with pytest.raises((AssertionError, StoreProtocolError, pytest.fail.Exception)):
        check(open_rig(mutant.shards))
