"""Runs every path of the sampler for every number of rows in a bucket.

The vendor's twelve configurations come first, in its order and with its log lines; then every path that the sampler names,
so that none is missing.

Source: vllm-gaudi, v1/worker/hpu_model_runner.py, warmup_sampler.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from trencadis.interfaces import AcceptanceRule
from trencadis.records import Bucket, DraftDistributions, Drafts, Phase, SamplingParams

__all__ = ["CONFIGURATIONS", "dummy_drafts", "sampler_sizes", "warm_up_sampler"]

logger = logging.getLogger("trencadis.gaudi")

CONFIGURATIONS = ((0.0, 1.0, 0), (1.0, 1.0, 0), (0.7, 0.9, 50), (0.3, 0.95, 20), (1.2, 0.8, 100), (0.8, 0.85, 0))
"""Temperature, top-p and top-k; each is used once with starting and once with continuing rows."""

Sample = Callable[[int, int, SamplingParams | None], None]
"""Samples (number of sequences, logits rows of each, parameters); None keeps the previous parameters."""


def sampler_sizes(buckets: Iterable[Bucket]) -> list[tuple[int, int]]:
    """Return the sizes that passes in these buckets sample, as (sequences, logits rows of each), ascending. Pure.

    Args:
        buckets: Buckets of both phases; those of a merged prefill with the maximum number of prompts as batch size.
    """
    return sorted({(bucket.batch_size, bucket.query_len if bucket.phase is Phase.DECODE else 1) for bucket in buckets})


def dummy_drafts(batch_size: int, steps: int, *, vocab_size: int, rule: AcceptanceRule) -> tuple[Drafts | None, ...]:
    """Return drafts that exercise each path of a rule: without distributions, and with them if the rule needs them. Pure.

    Args:
        batch_size: Number of sequences.
        steps: Logits rows of each sequence: drafts plus one.
        vocab_size: Vocabulary size of the model.
        rule: Acceptance rule that verifies the drafts.
    """
    if steps == 1 or not rule.needs_distributions:
        return (None,)
    count = batch_size * (steps - 1)
    nothing = np.zeros(count, np.int32)
    # Made on the host like a drafter's, without operations of the device.
    distribution = torch.from_numpy(np.full((1, vocab_size), 1.0 / vocab_size, np.float32))
    distributions = DraftDistributions(rows=nothing, probabilities=distribution)
    return None, Drafts(
        num_drafts=np.full(batch_size, steps - 1, np.int32), token_ids=nothing, distributions=distributions
    )


def warm_up_sampler(sizes: Sequence[tuple[int, int]], paths: Sequence[SamplingParams], *, sample: Sample) -> int:
    """Sample in every size and path; return the number of calls.

    Args:
        sizes: Sizes from :func:`sampler_sizes`.
        paths: Sampling parameters of each path of the sampler.
        sample: Samples with a size and parameters.
    """
    logger.info(
        "Warming up sampler with batch sizes: %s and following configs:",
        sorted({batch_size for batch_size, _ in sizes}),
    )
    configurations = [(changed, values) for changed in (True, False) for values in CONFIGURATIONS]
    for changed, (temperature, top_p, top_k) in configurations:
        logger.info("temp=%s, top_p=%s, top_k=%d, batch_changed=%s", temperature, top_p, top_k, changed)
    logger.info("Starting sampler warmup...")
    for batch_size, steps in sizes:
        for temperature, top_p, top_k in CONFIGURATIONS:
            params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k)
            sample(batch_size, steps, params)
            sample(batch_size, steps, None)
        for path in paths:
            sample(batch_size, steps, path)
    logger.info("Sampler warmup completed successfully")
    return len(sizes) * (2 * len(CONFIGURATIONS) + len(paths))
