from __future__ import annotations

import numpy as np
import pytest

from trencadis.engine.commit.committer import StopCheck
from trencadis.records import FinishReason, Request, SamplingParams
from trencadis_testing.engines import make_engine
from trencadis_testing.fakes import FakeBackend

EOS = 5


def waiting(**params):
    engine = make_engine(backend=FakeBackend(eos=EOS, max_model_len=12), num_blocks=8)
    request = Request(request_id="r", prompt_token_ids=range(10, 14), params=SamplingParams(**params))
    slot = engine.add(request)
    state = engine._state
    return state, state.table.sequence(slot), StopCheck(state)


@pytest.mark.representatives(20)
@pytest.mark.parametrize(
    ("run", "params", "reason", "stop"),
    [
        ([9], {"max_tokens": 3}, None, None),
        ([9], {"max_tokens": 1}, FinishReason.LENGTH, None),
        ([9, 9, 9], {"max_tokens": 3}, FinishReason.LENGTH, None),
        ([9] * 8, {"max_tokens": None}, FinishReason.LENGTH, None),
        ([9, EOS], {"max_tokens": 9}, FinishReason.STOP, EOS),
        ([EOS], {"max_tokens": 9, "ignore_eos": True}, None, None),
        ([EOS], {"max_tokens": 9, "min_tokens": 2}, None, None),
        ([9, EOS], {"max_tokens": 9, "min_tokens": 2}, FinishReason.STOP, EOS),
        ([7], {"max_tokens": 9, "stop_token_ids": (7,)}, FinishReason.STOP, 7),
        ([7], {"max_tokens": 1, "stop_token_ids": (7,)}, FinishReason.STOP, 7),
        ([EOS], {"max_tokens": 1, "ignore_eos": True}, FinishReason.LENGTH, None),
    ],
)
def test_late_tokens_end_a_text_as_those_of_a_step_do(run, params, reason, stop):
    state, sequence, stop_check = waiting(**params)
    end = stop_check.append(sequence, np.array(run, np.int32))
    if reason is None:
        assert end is None
        assert state.known_tokens(sequence).tolist() == [10, 11, 12, 13, *run]
        assert state.table.num_tokens[sequence.slot] == state.table.num_known_tokens[sequence.slot] == 4 + len(run)
    else:
        assert (end.finish_reason, end.stop_token_id, end.token_ids.tolist()) == (reason, stop, run)
        assert not state.slot_of


def test_newest_tokens_are_judged_each_for_its_own_sequence():
    engine = make_engine(backend=FakeBackend(eos=EOS))
    slots = [
        engine.add(Request(request_id=name, prompt_token_ids=range(1, 5), params=SamplingParams(**params)))
        for name, params in (
            ("plain", {"max_tokens": 9}),
            ("eos", {"max_tokens": 9}),
            ("own", {"max_tokens": 9, "stop_token_ids": (7,)}),
            ("not its own", {"max_tokens": 9, "stop_token_ids": (8,)}),
        )
    ]
    ended = StopCheck(engine._state).ended(np.array(slots, np.int32), np.array([9, EOS, 7, 7], np.int32))
    assert ended.tolist() == [False, True, True, False]
    assert len(engine.inspect().sequences) == 4
