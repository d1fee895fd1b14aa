"""What processes say to each other: here each is a thread, and the coordination service a dict."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from trainer.checkpoints.training_state import SharedSave
from trainer.errors import TrainingFailed, UserMistake
from trainer.launch.membership import Farewell, Membership
from trainer.launch.peers import OutOfTouchError, Peers, require_same, require_shared
from trainer.launch.signals import StopRequest


class MemoryTable:
    """JAX's coordination service, within one process."""

    def __init__(self):
        self.values: dict[str, str] = {}
        self._changed = threading.Condition()

    def key_value_set(self, key, value, allow_overwrite=False):
        with self._changed:
            assert allow_overwrite or key not in self.values, key
            self.values[key] = value
            self._changed.notify_all()

    def blocking_key_value_get(self, key, timeout_in_ms):
        with self._changed:
            if not self._changed.wait_for(lambda: key in self.values, timeout_in_ms / 1000):
                raise RuntimeError(f"DEADLINE_EXCEEDED: GetKeyValue() timed out with key: {key}")
            return self.values[key]

    def key_value_dir_get(self, key):
        with self._changed:
            return [item for item in self.values.items() if item[0].startswith(key)]

    def key_value_delete(self, key):
        with self._changed:
            self.values = {name: value for name, value in self.values.items() if not name.startswith(key)}


@pytest.fixture
def table() -> MemoryTable:
    return MemoryTable()


@pytest.fixture
def three(table) -> list[Peers]:
    return [Peers(index, 3, table) for index in range(3)]


def in_each(peers, act):
    """What `act` returns, or raises, in each process at the same time."""

    def outcome(each):
        try:
            return act(each)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(peers)) as threads:
        return list(threads.map(outcome, peers))


def test_everybody_gets_everybodys_word_in_order(three):
    for topic in ("first", "second"):
        assert (
            in_each(three, lambda each, topic=topic: each.exchange(topic, f"{topic} of {each.index}"))
            == [[f"{topic} of {index}" for index in range(3)]] * 3
        )


def test_what_was_exchanged_is_forgotten(three, table):
    in_each(three, lambda each: each.exchange("save/1/begun", "word"))
    in_each(three, lambda each: each.exchange("save/10/begun", "word"))
    three[1].forget("save/1")  # only process 0 frees it
    assert any("save/1/" in key for key in table.values)
    three[0].forget("save/1")
    assert not any("save/1/" in key for key in table.values)
    assert any("save/10/" in key for key in table.values)


def test_only_process_0_makes_what_is_its_own_to_make(three):
    made = []
    assert in_each(three, lambda each: each.of_first("steps", lambda: made.append(each.index) or "[3]")) == ["[3]"] * 3
    assert made == [0]
    assert Peers().of_first("alone", lambda: "made") == "made"


def test_a_process_that_says_nothing_is_named(three):
    three[0].hosts = ("a", "b", "c")
    outcome = in_each(three[:2], lambda each: each.exchange("topic", "word", patience_s=0.1))[0]
    assert isinstance(outcome, OutOfTouchError)
    assert "process 2 (c) didn't answer in time" in str(outcome)


def test_nobody_waits_for_a_process_that_has_given_up(three):
    three[2].post("save/1/given-up/2", "")
    begun = time.monotonic()
    outcomes = in_each(three[:2], lambda each: each.exchange("barrier", "", unless="save/1/given-up"))
    assert [str(outcome) for outcome in outcomes] == ["process 2 has given up"] * 2
    assert time.monotonic() - begun < 10


def test_a_service_that_is_gone_is_told(three):
    def get(key, timeout_in_ms):
        raise RuntimeError("UNAVAILABLE: failed to connect\nmore lines")

    three[1]._table.blocking_key_value_get = get
    with pytest.raises(OutOfTouchError, match=r"process 0 can't be reached any more: UNAVAILABLE: failed to connect$"):
        three[1].exchange("topic", "word")


def test_a_part_of_a_save_that_fails_in_one_process_fails_in_all(three):
    saves = {each.index: SharedSave(each, 1) for each in three}

    def begin(each):
        return saves[each.index].part("begun", lambda: f"digests {each.index}")

    def write(each):
        def act():
            if each.index == 1:
                raise OSError(28, "No space left on device")

        return saves[each.index].part("written", act)

    assert in_each(three, begin) == [["digests 0", "digests 1", "digests 2"]] * 3
    elsewhere, here, elsewhere_too = in_each(three, write)
    assert isinstance(here, OSError)
    for failure in (elsewhere, elsewhere_too):
        assert isinstance(failure, TrainingFailed)
        assert "process 1: OSError: [Errno 28] No space left on device" in str(failure)
    # A process that is still at a barrier of Orbax's learns it there.
    barrier = in_each(three[:1], lambda each: saves[0].barrier(key="async_write_complete", timeout_ms=60_000))[0]
    assert isinstance(barrier, OutOfTouchError)


def test_processes_with_other_configs_are_refused_with_one_message(three):
    values = [{"num_steps": 4, "mesh.data": 2}, {"num_steps": 4, "mesh.data": 2}, {"num_steps": 4, "mesh.data": 8}]
    outcomes = in_each(three, lambda each: require_same(each, "config", values[each.index]))
    assert {type(outcome) for outcome in outcomes} == {UserMistake}
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert "process 0 and process 2 differ in their config:\n  mesh.data: 2 and 8\n" in str(outcomes[0])
    assert in_each(three, lambda each: require_same(each, "data", values[0])) == [None] * 3


def test_a_workdir_that_is_each_machines_own_is_refused(three, tmp_path):
    folders = {0: tmp_path / "shared", 1: tmp_path / "shared", 2: tmp_path / "own"}
    for folder in folders.values():
        folder.mkdir(exist_ok=True)
    (tmp_path / "own" / ".lock").write_text("of an earlier run")
    outcomes = in_each(three, lambda each: require_shared(each, folders[each.index]))
    for outcome in outcomes:
        assert isinstance(outcome, UserMistake)
        assert "is not the same folder for process 0 and process 2" in str(outcome)


def test_after_a_signal_all_stop_at_the_same_place(three, rng):
    watches = [Membership(each) for each in three]
    told = {index: [] for index in range(3)}
    stops = [
        StopRequest(lambda *signal, own=told[index]: own.append(signal), membership=watch)
        for index, watch in enumerate(watches)
    ]
    pauses = rng.uniform(0, 0.003, (3, 10_000))
    go = threading.Barrier(4)

    def run(each):
        go.wait()
        for count, pause in enumerate(pauses[each.index]):
            if stops[each.index].requested:
                return count
            time.sleep(pause)
        return None

    def signal():
        go.wait()
        time.sleep(rng.uniform(0, 0.3))
        watches[1].announce_stop("SIGTERM")
        for watch in watches:  # each hears it at its own time
            threading.Thread(target=watch.on_stop, args=(1, "SIGTERM")).start()
            time.sleep(0.01)

    sender = threading.Thread(target=signal)
    sender.start()
    stopped_at = in_each(three, run)
    sender.join()
    assert stopped_at[0] is not None
    assert len(set(stopped_at)) == 1, stopped_at
    assert [told[index] for index in range(3)] == [
        [("SIGTERM", "process 1")],
        [("SIGTERM", None)],
        [("SIGTERM", "process 1")],
    ]
    assert all(stop.requested for stop in stops)


@pytest.fixture
def start(monkeypatch):
    """Starts a membership, and returns it and the list of (process, farewell) that it would end by."""
    opened = []

    def start(peers: Peers) -> tuple[Membership, list]:
        membership, heard = Membership(peers), []
        monkeypatch.setattr(membership, "_follow", lambda *end: heard.append(end))
        membership.__enter__()
        opened.append(membership)
        return membership, heard

    yield start
    for membership in opened:
        membership._closing.set()


def wait_until(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_end_of_one_process_is_told_to_the_others(three, start):
    (_, first), (second, none), (third, other) = map(start, three)
    third.announce_end(None)  # as the run does: nobody minds
    time.sleep(1.2)
    assert first == none == other == []
    second.announce_end(Farewell(1, "out of memory"))
    wait_until(lambda: first and other)
    assert first == other == [(1, Farewell(1, "out of memory"))]
    assert none == []


def test_a_silent_process_is_found_by_process_0(three, start, monkeypatch):
    monkeypatch.setattr("trainer.launch.membership.SILENT_AFTER_S", 1.5)
    (_, heard), _ = map(start, three[:2])  # process 2 gives no sign
    wait_until(lambda: heard)
    index, farewell = heard[0]
    assert (index, farewell.status) == (2, 69)
    assert "process 2 is gone: no sign of life for" in farewell.message
