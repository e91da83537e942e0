from __future__ import annotations

import numpy as np

from support.core.scheduling_watch import PlanWatch, StepWatch
from trencadis.records import Request, SamplingParams
from trencadis_testing.engines import make_engine
from trencadis_testing.fakes import FakeBackend


class Scene:
    """An engine of two rows, watched on both sides."""

    def __init__(self, **options) -> None:
        self.steps = StepWatch(FakeBackend(eos=-1, max_model_len=80), token_budget=16, max_num_seqs=2)
        self.engine = make_engine(
            executor=self.steps,
            num_blocks=20,
            max_num_seqs=2,
            max_num_batched_tokens=16,
            async_scheduling=False,
            **options,
        )
        self.steps.engine, self.state = self.engine, self.engine._state
        self.plans = PlanWatch(self.engine, max_drafts=0)

    def add(self, name: str, *, length: int = 6, max_tokens: int = 9, **fields) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        prompt = tuple((sum(map(ord, name)) + i) % 97 for i in range(length))
        self.engine.add(Request(request_id=name, prompt_token_ids=prompt, params=params, **fields))


def test_every_plan_and_every_output_is_kept_once() -> None:
    scene = Scene()
    scene.add("a")
    for number in range(3):
        scene.engine.step()
        assert [plan.step for plan in scene.plans.take()] == [number]
        assert scene.steps.take_outputs() == [(number, [1])]
    assert (scene.plans.take(), scene.steps.take_outputs()) == ([], [])
    assert scene.plans.faults + scene.steps.faults == []


def test_writing_into_a_block_that_somebody_else_holds_is_seen() -> None:
    scene = Scene()
    scene.add("a")
    scene.engine.step()
    block = scene.state.rows.block_tables[scene.state.table.row[0], 1]
    scene.state.blocks.ref_counts[block] += 1
    scene.engine.step()
    assert any(fault.startswith("11: row") for fault in scene.steps.faults)


def test_writing_without_a_block_is_seen() -> None:
    scene = Scene()
    scene.add("a")
    scene.engine.step()
    scene.engine._scheduler._allocate = lambda view, decodes, lengths: (decodes, lengths)
    for _ in range(3):  # two blocks hold eight tokens, six are the prompt
        scene.engine.step()
    assert scene.steps.faults[0].startswith("10: row")


def test_preempting_with_blocks_to_spare_is_seen() -> None:
    scene = Scene()
    scene.add("a")
    scene.add("b")
    scene.engine.step()
    allocate = scene.engine._scheduler._allocate

    def greedy(view, decodes, lengths):
        scene.engine._scheduler._make_room(view)
        stays = np.isin(decodes, scene.state.running)
        return allocate(view, decodes[stays], lengths[stays])

    scene.engine._scheduler._plan_decodes = lambda *_: None
    scene.engine._scheduler._allocate = greedy
    scene.engine.step()
    assert any(fault.startswith("14: ") for fault in scene.plans.faults)
