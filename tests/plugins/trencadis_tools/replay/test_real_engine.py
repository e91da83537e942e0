"""Records of the demo model on the torch backend, with everything that a real engine has."""

from __future__ import annotations

from pathlib import Path

import pytest

from trencadis import LLM, SamplingParams
from trencadis_tools.recorder.flight_record import RecordedAttempt, RecordedCommit, decode_flight_record, int32s
from trencadis_tools.replay import recorded_config, replay_exactly

PROMPTS = [f"Number {number} says: " + "again and again " * (1 + number % 4) for number in range(6)]


def record(folder, **config):
    tables = {"flight_recorder.folder": str(folder), "engine.max_num_seqs": 4, "observer.names": [], **config}
    with LLM("demo", **tables) as llm:
        llm.generate(PROMPTS, SamplingParams(max_tokens=24, temperature=0))
        llm.generate(PROMPTS[:3], SamplingParams(max_tokens=20, temperature=0))
        (path,) = llm.flight_record()["paths"]
    return decode_flight_record(Path(path).read_bytes())


@pytest.mark.parametrize(
    "config",
    [
        {
            "speculation.name": "ngram",
            "draft_length.name": "fixed",
            "cache.num_blocks": 20,
            "model.max_model_len": 300,
            "flight_recorder.num_steps": 12,
        },
        pytest.param({}, marks=pytest.mark.nightly),
    ],
    ids=["speculation, preemption, in mid-run", "plain"],
)
def test_a_real_engine_is_replayed(tmp_path, config):
    found = record(tmp_path, **config)
    plans = [event for event in found.events if isinstance(event, RecordedAttempt) and event.is_plan]
    commits = [event for event in found.events if isinstance(event, RecordedCommit)]
    if config:
        assert found.frame is not None
        assert any(int32s(plan.num_drafts).any() for plan in plans)
    assert all(0 < one.device_s < one.end_s - found.events[0].now_s for one in commits)
    config, registry = recorded_config(found, name="x.flight")
    replayed = replay_exactly(found, config, registry)
    assert replayed.difference is None
    assert replayed.num_steps == found.num_steps > 12
