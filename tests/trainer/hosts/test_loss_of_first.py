"""The record's end when process 0 is gone: written if it is, and only then."""

import contextlib
import json
import socket
import subprocess
import sys
import threading

import pytest

from trainer.hosts import loss_of_first
from trainer.hosts.loss_of_first import end_record, recording_loss_of_first
from trainer.hosts.peers import Peers


@pytest.fixture
def record(tmp_path):
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"status": "running", "message": None, "updated": "before", "step": 7}))
    return path


@pytest.fixture
def listener():
    with contextlib.closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener


def address_of(listener) -> str:
    return f"127.0.0.1:{listener.getsockname()[1]}"


def test_a_record_is_ended_if_process_0_does_not_answer(record, listener):
    address = address_of(listener)
    listener.close()
    end_record(record, address, "process 0 (node0)")
    fields = json.loads(record.read_text())
    assert fields["status"] == "failed"
    assert fields["message"].startswith(f"process 0 (node0) is gone: nothing answers at {address}, and JAX has ended")
    assert fields["updated"] != "before"
    assert fields["step"] == 7


def test_a_process_that_is_being_taken_apart_may_answer_for_a_while(record, listener, monkeypatch):
    monkeypatch.setattr(loss_of_first, "_ASKED_EVERY_S", 0.05)
    address, closing = address_of(listener), threading.Timer(0.3, listener.close)
    closing.start()
    end_record(record, address, "process 0")
    closing.join()
    assert json.loads(record.read_text())["status"] == "failed"


def test_a_record_stays_as_it_is_while_process_0_answers(record, listener, monkeypatch):
    monkeypatch.setattr(loss_of_first, "_ANSWERS_FOR_S", 0.2)
    before = record.read_bytes()
    end_record(record, address_of(listener), "process 0")
    assert record.read_bytes() == before


@pytest.mark.parametrize("status", ["completed", "failed", "preempted"])
def test_a_record_that_has_an_end_keeps_it(record, status):
    record.write_text(json.dumps({"status": status, "message": "its own"}))
    end_record(record, "127.0.0.1:1", "process 0")
    assert json.loads(record.read_text()) == {"status": status, "message": "its own"}


def test_a_last_word_that_comes_while_process_0_is_asked_for_is_kept(record, monkeypatch):
    def ends_the_record_and_exits(_):
        record.write_text(json.dumps({"status": "failed", "message": "its own"}))
        return False

    monkeypatch.setattr(loss_of_first, "_answers", ends_the_record_and_exits)
    end_record(record, "127.0.0.1:1", "process 0")
    assert json.loads(record.read_text()) == {"status": "failed", "message": "its own"}


def test_a_record_that_was_never_written_is_not_missed(tmp_path):
    end_record(tmp_path / "record.json", "127.0.0.1:1", "process 0")
    assert not list(tmp_path.iterdir())


PROCESS_1 = """
import os, sys
from pathlib import Path
from trainer.hosts.loss_of_first import recording_loss_of_first
from trainer.hosts.peers import Peers

peers = Peers(1, 2, table=object())
peers.first_address = "127.0.0.1:1"
with recording_loss_of_first(Path(sys.argv[1]), peers):
    if sys.argv[2] == "aborts":
        os.abort()
    if sys.argv[2] == "raises":
        raise ConnectionResetError
"""


@pytest.mark.parametrize(("ending", "status"), [("aborts", "failed"), ("raises", "failed"), ("returns", "running")])
def test_process_1_leaves_it_to_its_child(record, ending, status):
    # The child inherits the pipe, so that the command's end is also the child's.
    command = [sys.executable, "-c", PROCESS_1, str(record), ending]
    subprocess.run(command, capture_output=True, timeout=60)
    assert json.loads(record.read_text())["status"] == status


@pytest.mark.parametrize("index", [0, 2])
def test_no_other_process_has_a_child(record, index, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    with recording_loss_of_first(record, Peers(index, 3, table=object())):
        pass
