from __future__ import annotations

import pytest
import torch

from trencadis.errors import BackendError
from trencadis_torch.graphs.checked_capture import CheckedRecorder


@pytest.fixture
def place():
    """Input, weight and output that outlive graphs."""
    return torch.zeros(3), torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3)


def test_replay_reads_what_the_input_holds_then(place):
    given, weight, output = place
    graph = CheckedRecorder(place).capture(lambda: output.copy_((given * weight).view(3, 1).squeeze(1) + 1), what="it")
    for value in (2.0, 5.0):
        given.fill_(value)
        graph.replay()
        assert output.tolist() == [value + 1, 2 * value + 1, 3 * value + 1]


def test_what_python_chose_stays_as_it_was(place):
    given, _, output = place
    chosen = [2.0]
    graph = CheckedRecorder(place).capture(lambda: output.copy_(given * chosen[0]), what="it")
    chosen[0] = 7.0
    given.fill_(1.0)
    graph.replay()
    assert output.tolist() == [2.0, 2.0, 2.0]


def test_operations_in_place_are_run_again(place):
    given, weight, output = place

    def run():
        output.zero_()
        part = torch.empty(3)
        torch.mul(given, weight, out=part)
        output.index_copy_(0, torch.arange(2), part[1:])

    graph = CheckedRecorder(place).capture(run, what="it")
    given.fill_(4.0)
    graph.replay()
    assert output.tolist() == [8.0, 12.0, 0.0]


def test_temporaries_are_nonsense_until_they_are_written(place):
    """What was computed before the capture, and is neither an input nor written again, would be stale on a device."""
    given, _, output = place
    held = {}

    def run():
        held["temporary"] = given + 1
        output.copy_(held["temporary"])

    recorder = CheckedRecorder(place)
    graph = recorder.capture(run, what="it")
    first = held["temporary"]
    graph.replay()
    assert first.tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(BackendError, match=r"add.*tensor \[3\] that was made outside"):
        recorder.capture(lambda: output.copy_(first + given), what="another")


def test_tensor_made_from_numbers_of_the_host_is_refused(place):
    """On a device it would be a copy of memory that is gone when the graph is replayed."""
    given, _, output = place
    with pytest.raises(BackendError, match="made outside"):
        CheckedRecorder(place).capture(lambda: output.copy_(given + torch.tensor([1.0, 2.0, 3.0])), what="it")


def test_host_is_not_asked(place):
    given, _, output = place
    with pytest.raises(BackendError, match=r"the decode cannot be captured.*brings a value to the host"):
        CheckedRecorder(place).rehearse(lambda: output.fill_(given.sum().item()), what="the decode")


def test_rehearsal_tells_the_size_of_temporaries(place):
    given, _, output = place
    assert CheckedRecorder(place).rehearse(lambda: output.copy_(given + 1), what="it") == 12


def test_tensors_may_be_declared_later():
    recorder, late, output = CheckedRecorder(()), torch.ones(2), torch.zeros(2)
    recorder.lasts(late, output)
    recorder.capture(lambda: output.copy_(late), what="it").replay()
    assert output.tolist() == [1.0, 1.0]
    assert recorder.free_bytes() > 0
    recorder.close()
    with pytest.raises(BackendError, match="made outside"):
        recorder.capture(lambda: output.copy_(late), what="it")
