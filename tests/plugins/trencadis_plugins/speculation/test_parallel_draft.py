from __future__ import annotations

import json
import random
from pathlib import Path

import attrs
import pytest
import torch

from support.strategies.draft_models import (
    LIMITS,
    MASK,
    VOCAB_SIZE,
    context_of,
    late,
    logits_behind,
    parallel_draft,
    runs,
    save_llama,
)
from trencadis.errors import ConfigValueError
from trencadis.records import Request, SamplingParams
from trencadis_plugins.speculation.parallel_draft import ParallelDraft
from trencadis_testing.speculation import SpeculationConformance, draft_view


class TestParallelDraft(SpeculationConformance):
    @pytest.fixture(autouse=True)
    def _model(self, tiny: Path) -> None:
        self.made = parallel_draft(tiny, limits=None)

    def make(self) -> ParallelDraft:
        return late(ParallelDraft)(self.made._config, context_of())


def behind_masks(path: Path, tokens: list[int], count: int) -> torch.Tensor:
    """Return the logits behind the last token and behind each mask, ``[count, V]``; the mask itself is never drafted."""
    logits = logits_behind(path, [*tokens, *[MASK] * (count - 1)], count).clone()
    logits[:, MASK] = -torch.inf
    return logits


@pytest.mark.parametrize("budget", [12, 64])
def test_drafts_are_what_stands_behind_the_masks_whatever_came_before(tiny: Path, budget: int) -> None:
    made = parallel_draft(tiny, limits=attrs.evolve(LIMITS, max_num_batched_tokens=budget))
    rng = random.Random(1)
    requests = [Request(request_id=str(i), prompt_token_ids=(1,), params=SamplingParams()) for i in range(4)]
    histories = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (1, 7, 30, 61)]
    for _ in range(6):
        most = [rng.randrange(5) for _ in histories]
        found = runs(made.propose(draft_view(histories, most=most, requests=requests)))
        for history, run, count in zip(histories, found, most, strict=True):
            assert run == (behind_masks(tiny, history, count).argmax(-1).tolist() if count else [])
            history.extend([*run[: rng.randrange(len(run) + 1)], rng.randrange(3, VOCAB_SIZE)])


def test_each_draft_has_the_distribution_behind_its_own_mask(tiny: Path) -> None:
    made = parallel_draft(tiny, sampling="probabilistic")
    params = SamplingParams(temperature=1.3)
    request = Request(request_id="r", prompt_token_ids=(1,), params=params)
    history = [8, 9, 30, 31]
    drafts = made.propose(draft_view([history], requests=[request]))
    assert drafts.distributions is not None
    distributions = drafts.distributions.probabilities[torch.as_tensor(drafts.distributions.rows).long()]
    assert torch.allclose(distributions, (behind_masks(tiny, history, 4) / 1.3).softmax(-1), atol=1e-5)
    assert float(distributions[:, MASK].max()) == 0


def test_one_forward_yields_all_drafts(tiny: Path) -> None:
    made = parallel_draft(tiny)
    history = [5, 6, 7]
    request = Request(request_id="r", prompt_token_ids=(1,), params=SamplingParams())
    made.propose(draft_view([history], requests=[request]))
    before = made.ready.runner._steps
    made.propose(draft_view([[*history, 8, 9, 10, 11, 12]], requests=[request]))
    assert made.ready.runner._steps == before + 1


def test_the_model_itself_may_name_its_mask(tmp_path: Path) -> None:
    path = save_llama(tmp_path / "taught", mask_token_id=90)
    assert json.loads((path / "config.json").read_text(encoding="utf-8"))["mask_token_id"] == 90
    made = parallel_draft(path, mask_token_id=-1)
    logits = logits_behind(path, [5, 6, 90], 2).clone()
    logits[:, 90] = -torch.inf
    assert runs(made.propose(draft_view([[5, 6]], most=2))) == [logits.argmax(-1).tolist()]


def test_a_mask_that_there_is_not_is_refused(tiny: Path) -> None:
    with pytest.raises(ConfigValueError, match=r"names no mask_token_id"):
        parallel_draft(tiny, mask_token_id=-1)
    with pytest.raises(ConfigValueError, match=r"mask_token_id = 97: the model has 97 tokens"):
        parallel_draft(tiny, mask_token_id=97)
