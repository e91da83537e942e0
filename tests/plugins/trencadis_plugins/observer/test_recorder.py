"""Lines of the recorder: complete, and in agreement with the engine's own counts."""

from __future__ import annotations

import json

import attrs
import pytest

from trencadis.clock import SimulatedClock
from trencadis.errors import ConfigValueError
from trencadis.interfaces import ComponentContext
from trencadis.records import Bucket, Request, SamplingParams, StepShape, UnifiedBucket
from trencadis_plugins.observer.config import RecorderObserverConfig
from trencadis_plugins.observer.recorder import RecorderObserver
from trencadis_testing.engines import make_engine
from trencadis_testing.fakes import FakeBackend
from trencadis_testing.observer import SAMPLE_STEPS, ObserverConformance, finished_sequence, step_stats

CONTEXT = ComponentContext(clock=SimulatedClock(), seed=0)


@pytest.fixture
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("in_a_folder")
class TestRecorderObserver(ObserverConformance):
    def make(self):
        return RecorderObserver(RecorderObserverConfig(), CONTEXT)


def _lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def _recorder(path, context=CONTEXT):
    return RecorderObserver(RecorderObserverConfig(file=str(path)), context)


def test_lines_hold_every_size_of_the_step(tmp_path):
    recorder = _recorder(tmp_path / "steps.jsonl")
    busy = attrs.evolve(SAMPLE_STEPS["busy"], num_bucket_hits=2)
    recorder.on_step(busy)
    recorder.close()
    header, line = _lines(tmp_path / "steps.jsonl")
    assert header["format"] == "trencadis steps 1"
    assert header["processor"]
    sizes = {field.name for field in attrs.fields(StepShape)}
    assert sizes <= set(line)
    assert {name: line[name] for name in sizes} == {
        "num_decodes": 2,
        "num_prefills": 1,
        "num_decode_tokens": 2,
        "num_prefill_tokens": 68,
        "num_decode_context": 52,
        "num_prefill_context": 100,
        "prefill_products": sum(range(33, 101)),
        "num_new": 1,
        "buckets": [["prefill", 1, 68, 8], ["decode", 2, 1, 8]],
    }
    assert (line["device_s"], line["plan_s"], line["commit_s"]) == (0.02, 0.001, 0.0005)


def test_wall_time_counts_from_the_last_commit_and_leaves_idle_time_out(tmp_path):
    recorder = _recorder(tmp_path / "steps.jsonl")
    for now_s, start_s, num_left in ((10.0, 9.0, 2), (11.5, 9.5, 2), (13.0, 12.0, 1), (14.0, 13.5, 0), (21.0, 20.0, 0)):
        recorder.on_step(step_stats(now_s=now_s, start_s=start_s, num_scheduled_tokens=1, num_running=num_left))
    recorder.close()
    # The second overlaps with the first, the third waits for who calls the engine, and before the last there is nothing to do.
    lines = _lines(tmp_path / "steps.jsonl")[1:]
    assert [line["wall_s"] for line in lines] == [1.0, 1.5, 1.5, 1.0, 1.0]
    assert [line["overlaps"] for line in lines] == [False, True, False, False, False]


def test_a_request_that_its_caller_ends_between_two_steps_leaves_idle_time(tmp_path):
    recorder = _recorder(tmp_path / "steps.jsonl")
    one = {"num_scheduled_tokens": 1, "num_running": 1}
    recorder.on_step(step_stats(now_s=10.0, start_s=9.0, **one))
    recorder.on_request(attrs.evolve(finished_sequence(), finish_s=10.5))
    recorder.on_step(step_stats(now_s=21.0, start_s=20.0, **one))
    recorder.on_request(attrs.evolve(finished_sequence(), finish_s=22.4))  # with the commit of the next step
    recorder.on_step(step_stats(now_s=22.5, start_s=22.0, **one | {"num_running": 0}))
    recorder.close()
    assert [line["wall_s"] for line in _lines(tmp_path / "steps.jsonl")[1:]] == [1.0, 1.0, 1.5]


def test_unified_buckets_and_programs_compiled_meanwhile_are_told_apart(tmp_path):
    recorder = _recorder(tmp_path / "steps.jsonl")
    prefill = SAMPLE_STEPS["busy"].passes[0]
    passes = tuple(attrs.evolve(prefill, bucket=bucket) for bucket in (UnifiedBucket(64, 2, 3, True), Bucket(1, 64, 2)))
    recorder.on_step(step_stats(num_scheduled_tokens=68, passes=passes, num_bucket_hits=2, num_unprepared=1))
    recorder.close()
    line = _lines(tmp_path / "steps.jsonl")[1]
    assert line["buckets"] == [["unified", 64, 2, 3, True], ["prefill", 1, 64, 2]]
    assert line["num_compilations"] == 1


def test_every_replica_has_a_file_of_its_own(tmp_path):
    recorder = _recorder(tmp_path / "steps.jsonl", attrs.evolve(CONTEXT, replica=1, num_replicas=2))
    recorder.on_step(SAMPLE_STEPS["busy"])
    recorder.close()
    assert [path.name for path in tmp_path.iterdir()] == ["steps.1.jsonl"]


def test_a_directory_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(ConfigValueError, match=r"observer\.recorder\.file"):
        _recorder(tmp_path / "nowhere" / "steps.jsonl")


@pytest.mark.parametrize("overlaps", [False, True], ids=["one_at_a_time", "overlapped"])
def test_records_of_an_engine_add_up_to_its_totals(tmp_path, overlaps):
    recorder = _recorder(tmp_path / "steps.jsonl")
    backend = FakeBackend(eos=-1, max_model_len=400)
    engine = make_engine(
        backend=backend,
        observers=[("recorder", recorder)],
        num_blocks=64,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        async_scheduling=overlaps,
        prefix_caching=False,
    )
    lengths = [(3 + 7 * index % 50, 1 + 5 * index % 11) for index in range(12)]
    for index, (prompt, output) in enumerate(lengths):
        params = SamplingParams(max_tokens=output, temperature=0)
        prompt_token_ids = tuple(1 + (index + place) % 9 for place in range(prompt))
        engine.add(Request(request_id=str(index), prompt_token_ids=prompt_token_ids, params=params))
    while engine.has_work:
        engine.step()
    totals = engine.totals
    engine.close()
    lines = _lines(tmp_path / "steps.jsonl")[1:]
    total = {
        name: sum(line[name] for line in lines)
        for name in lines[0]
        if name not in {"step", "buckets", "now_s", "overlaps"}
    }
    assert total["num_decode_tokens"] + total["num_prefill_tokens"] == totals.num_scheduled_tokens
    assert total["num_emitted_tokens"] == totals.num_emitted_tokens == sum(output for _, output in lengths)
    assert (total["num_new"], totals.num_preempted) == (len(lengths), 0)
    assert total["device_s"] == pytest.approx(totals.device_s)
    # Each token reads itself and all before it; the last one of a text is not computed.
    reads = sum(place + 1 for prompt, output in lengths for place in range(prompt + output - 1))
    assert total["prefill_products"] + total["num_decode_context"] == reads
