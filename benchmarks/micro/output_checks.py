"""What the checks of steps and samplers cost beside what they check.

Run: python benchmarks/micro/output_checks.py

Prints, by sequences in a decode step, µs of CPU time (the best of several repeats): the engine's check of an output, a sampler's call as it
is and through the guard, and an acceptance rule's the same, with four drafts for each sequence.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from trencadis.engine.batching.passes import PassCounts
from trencadis.engine.commit.output_check import OutputCheck
from trencadis.engine.inspect.accounting import SubmittedStep
from trencadis.engine.sampling.guarded import GuardedSampler
from trencadis.interfaces import SamplingContext, Verification
from trencadis.records import Plan, RowStart, SamplingParams, StepOutput
from trencadis_plugins.acceptance.match import Match
from trencadis_plugins.sampling.greedy import GreedySampler
from trencadis_stages.speculation.acceptance import GuardedAcceptance
from trencadis_testing.backend import ArgmaxSampler

VOCAB_SIZE = 32_000
REPEATS, CALLS = 15, 200


def best_us(call: Callable[[], object]) -> float:
    """Return the CPU time of a call, µs: the least of all repeats, for other work only adds to it."""
    found = []
    for _ in range(REPEATS):
        start = time.process_time()
        for _ in range(CALLS):
            call()
        found.append((time.process_time() - start) / CALLS)
    return min(found) * 1e6


class Done:
    """A step that has run."""

    def __init__(self, output: StepOutput) -> None:
        self.output = output

    def wait(self) -> StepOutput:
        """Return the output."""
        return self.output


def step_of(num: int) -> SubmittedStep:
    """Return a decode step of some sequences."""
    ones, numbers = np.ones(num, np.int32), np.arange(num, dtype=np.int32)
    plan = Plan(
        step=3,
        slots=numbers,
        rows=numbers,
        epochs=numbers.astype(np.int64),
        starts=numbers,
        num_scheduled=ones,
        samples=ones.astype(np.bool_),
    )
    output = StepOutput(token_ids=numbers.copy(), num_emitted=ones.copy(), step=3)
    return SubmittedStep(
        plan=plan,
        pending=Done(output),
        plan_s=0.0,
        num_prompt_tokens_admitted=0,
        num_prompt_tokens_cached=0,
        num_recomputed_tokens=0,
        pass_counts=PassCounts(),
    )


def output_check_us(num: int) -> float:
    """Return what looking at an output costs; waiting for it is not counted."""
    check, step = OutputCheck(vocab_size=VOCAB_SIZE), step_of(num)
    output = step.pending.wait()
    return best_us(lambda: check._is_plain(step.plan, output) or check._fault(step.plan, output))


def sampler_us(num: int, sampler: GreedySampler | ArgmaxSampler, *, guarded: bool) -> float:
    """Return what a call of a sampler costs."""
    one = GuardedSampler("it", sampler) if guarded else sampler
    one.allocate(num_rows=num, vocab_size=VOCAB_SIZE, device=torch.device("cpu"))
    for row in range(num):
        tokens = np.zeros(100, np.int32)
        one.start_row(RowStart(row=row, token_ids=tokens, num_prompt_tokens=100, params=SamplingParams(), seed=0))
    context = SamplingContext(
        rows=tuple(range(num)), positions=(1000,) * num, tokens=torch.zeros((num, 4096), dtype=torch.int32)
    )
    logits = torch.randn((num, VOCAB_SIZE))
    return best_us(lambda: one.sample(logits, context))


def rule_us(num: int, *, guarded: bool) -> float:
    """Return what an acceptance rule costs for four drafts of each sequence."""
    rule = GuardedAcceptance("it", Match()) if guarded else Match()
    tokens = torch.zeros((num, 4), dtype=torch.int64)
    seen = Verification(
        tokens=tokens,
        parents=torch.arange(4).expand(num, 4),
        num_drafts=torch.full((num,), 4),
        is_linear=True,
        sampled=torch.zeros((num, 5), dtype=torch.int64),
    )
    return best_us(lambda: rule.accept(seen))


@torch.inference_mode()
def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print(
        f"{'sequences':>9} {'output':>8} {'greedy':>8} {'guarded':>8} {'foreign':>8} {'guarded':>8} {'match':>8} {'guarded':>8}"
    )
    for num in (1, 8, 64):
        numbers = [output_check_us(num)]
        for sampler in (GreedySampler, ArgmaxSampler):
            numbers += [sampler_us(num, sampler(), guarded=guarded) for guarded in (False, True)]
        numbers += [rule_us(num, guarded=guarded) for guarded in (False, True)]
        print(f"{num:>9} " + " ".join(f"{number:8.1f}" for number in numbers))


if __name__ == "__main__":
    main()
