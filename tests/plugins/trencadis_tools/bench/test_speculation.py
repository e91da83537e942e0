from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

from trencadis.config import Config
from trencadis.errors import StepFailedError
from trencadis.interfaces import SchedulingPolicy
from trencadis.registry import Registry
from trencadis.text import Tokenizer
from trencadis_plugins.speculation.suffix import Suffix
from trencadis_testing.doubles import ScriptedSpeculator
from trencadis_testing.fakes import fake_text
from trencadis_tools.bench import NO_DRAFTER, SpeculationWorkload, measure_speculation, read_prompts

House = Callable[..., tuple[Config, Registry]]
WORKLOAD = SpeculationWorkload(prompts=((1, 2, 3), (4, 5), (6, 7, 8, 9)), max_tokens=9)


def knows(num_right: int) -> Callable[[], ScriptedSpeculator]:
    """Of three drafts the first so many are right."""

    def draft(tokens):
        right = fake_text(tokens.tolist(), 3, vocab_size=4096, eos=-1)
        return [token if i < num_right else token + 1 for i, token in enumerate(right)]

    return lambda: ScriptedSpeculator(draft)


def measured(fake_house: House, num_right: int, workload: SpeculationWorkload = WORKLOAD):
    config, registry = fake_house(speculator=knows(num_right))
    (result,) = measure_speculation(config, registry, workload, drafters=["fake"])
    return result


def test_an_oracle_gives_all_its_drafts_and_one_more_token_a_step(fake_house: House) -> None:
    result = measured(fake_house, 3)
    # Nine tokens: one from the prompt, then two steps of four.
    assert (result.tokens_per_step, result.drafts_per_step, result.acceptance_ratio) == (4, 3, 1)
    assert result.acceptance_by_position == (1, 1, 1)
    assert (result.num_prompts, result.num_same_texts, result.num_output_tokens) == (3, 3, 27)


def test_positions_are_counted_apart(fake_house: House) -> None:
    result = measured(fake_house, 1)
    assert result.tokens_per_step == 2
    assert result.acceptance_by_position == (1, 0, 0)


@pytest.mark.parametrize("num_streams", [1, 2, 8])
def test_wrong_drafts_cost_no_token(fake_house: House, num_streams: int) -> None:
    result = measured(fake_house, 0, attrs.evolve(WORKLOAD, num_streams=num_streams))
    assert (result.tokens_per_step, result.acceptance_ratio, result.num_same_texts) == (1, 0, 3)


def test_no_drafter_is_measured_like_any_other(fake_house: House) -> None:
    (result,) = measure_speculation(*fake_house(), WORKLOAD, drafters=[NO_DRAFTER])
    assert (result.drafter, result.tokens_per_step, result.drafts_per_step) == (NO_DRAFTER, 1, 0)
    assert result.acceptance_by_position == ()
    assert result.speed_up > 0
    assert sorted(result.speed_up_quartiles) == list(result.speed_up_quartiles)


def test_a_drafter_that_remembers_answers_has_not_seen_those_of_repeats(fake_house: House) -> None:
    prompts = ((1, 2, 3), (4, 5), (1, 2, 3), (1, 2, 3))
    config, registry = fake_house(speculator=Suffix)
    (once,) = measure_speculation(config, registry, attrs.evolve(WORKLOAD, prompts=prompts[:2]), drafters=["fake"])
    (again,) = measure_speculation(config, registry, attrs.evolve(WORKLOAD, prompts=prompts), drafters=["fake"])
    assert once.tokens_per_step == again.tokens_per_step == 1


def test_a_drafter_remembers_answers_to_other_prompts(fake_house: House) -> None:
    # The second prompt is how the answer to the first one goes on.
    first = (1, 2, 3)
    second = (*first, *fake_text(first, 4, vocab_size=4096, eos=-1))
    config, registry = fake_house(speculator=Suffix)
    workload = attrs.evolve(WORKLOAD, prompts=(first, second))
    (result,) = measure_speculation(config, registry, workload, drafters=["fake"])
    assert result.acceptance_ratio > 0


def test_a_request_that_fails_ends_the_measurement(fake_house: House) -> None:
    class Refuses(SchedulingPolicy):
        def order(self, view):
            raise RuntimeError("no order today")

    with pytest.raises(StepFailedError, match="no order today"):
        measure_speculation(*fake_house(policy=Refuses), WORKLOAD, drafters=[NO_DRAFTER])


# ------------------------------------------------------------------------------------------------------ prompts


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., Path]:
    def write(*lines: str) -> Path:
        path = tmp_path / "prompts.jsonl"
        path.write_text("\n".join(lines))
        return path

    return write


def test_a_line_is_a_prompt_turns_or_messages(file, tokenizer: Tokenizer) -> None:
    chat = [{"role": "user", "content": "Good morrow"}]
    path = file(
        json.dumps({"prompt": "The sea"}),
        "",
        json.dumps({"turns": ["Good morrow", "And then?"]}),
        json.dumps({"messages": chat}),
    )
    plain, turns, messages = read_prompts(path, tokenizer)
    assert tokenizer.decode(plain) == "The sea"
    assert turns == messages
    assert "Good morrow" in tokenizer.decode(turns)
    assert "And then?" not in tokenizer.decode(turns)


def test_the_limit_counts_prompts(file, tokenizer: Tokenizer) -> None:
    path = file(*(json.dumps({"prompt": f"number {i}"}) for i in range(5)))
    assert len(read_prompts(path, tokenizer, limit=2)) == 2
    assert len(read_prompts(path, tokenizer)) == 5
