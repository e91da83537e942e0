"""Runs passes on the device: inputs ▶ forward ▶ logits ▶ sampling, each with shapes determined by the bucket.

mark │ drafts │ inputs ││ forward (a graph) ││ sampling, tokens written back │ mark
"""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt
import torch

from trencadis.interfaces import AcceptanceRule, Sampler
from trencadis.records import Bucket, Drafts, Int32Array, Pass, Phase, UnifiedBucket
from trencadis_gaudi.device_rows import DeviceRows
from trencadis_gaudi.graphs.model import Forward
from trencadis_gaudi.habana import Habana
from trencadis_gaudi.passes.tensors import GaudiPasses, PassInputs
from trencadis_gaudi.prompt_scores import NO_PROMPTS, padded_plan, score_padded
from trencadis_torch.device import to_device
from trencadis_torch.parallel.tokens import TokenExchange
from trencadis_torch.prompt_logprobs import PromptLogprobs, PromptPlan
from trencadis_torch.runner import PassResult
from trencadis_torch.verify import SamplePlan, emit

__all__ = ["GaudiRunner", "empty_pass"]


class GaudiRunner:
    """Runs a model with rows and a cache, one pass at a time.

    Args:
        forward: Forward of the model.
        passes: Makes the inputs of passes.
        rows: Rows with tokens on the device.
        tables: Block tables of all rows, int32 ``[num_rows, num_columns]``; their owner changes them in place.
        habana: Device of the model.
        max_merged: Maximum prompts of a merged prefill pass; 0: prefills are rectangles.
        max_num_seqs: Maximum sequences of a unified pass.
        max_steps: Maximum tokens that a sequence of a unified pass emits.
        exchange: Exchange of tokens between ranks, one of which samples and scores prompts; None: there is one rank.
    """

    def __init__(
        self,
        forward: Forward,
        passes: GaudiPasses,
        *,
        rows: DeviceRows,
        tables: Int32Array,
        habana: Habana,
        max_merged: int = 0,
        max_num_seqs: int = 1,
        max_steps: int = 1,
        exchange: TokenExchange | None = None,
    ) -> None:
        self._forward = forward
        self._passes = passes
        self._rows = rows
        self._tables = tables
        self._habana = habana
        self._max_merged = max_merged
        self._max_num_seqs = max_num_seqs
        self._max_steps = max_steps
        self._exchange = exchange

    def run(
        self, one: Pass, *, drafts: Drafts | None, sampler: Sampler, acceptance: AcceptanceRule, graph: bool
    ) -> PassResult:
        """Run a pass and write the emitted tokens after the rows' tokens.

        Args:
            one: Pass to run; without sequences only padding is computed, which changes no state.
            drafts: Drafts of the whole plan; None: there are none.
            sampler: Sampler that chooses tokens.
            acceptance: Rule that decides how many drafts are accepted.
            graph: Whether to capture or replay a graph.
        """
        if self._max_steps > 1 if isinstance(one.bucket, UnifiedBucket) else one.bucket.phase is Phase.DECODE:
            self._rows.write_pass_drafts(one, drafts)
        inputs = self._passes.inputs(one, self._rows, self._tables)
        shaped = attrs.evolve(one, bucket=self.sampling_bucket(one.bucket))
        samples = SamplePlan.of(shaped, inputs.firsts, self._rows.history, padded=True)
        prompts = PromptPlan.of(one, inputs.firsts, self._rows)
        keep = np.zeros(_num_logits(shaped.bucket), np.int64) if samples is None else samples.tokens
        if prompts is None:
            scores, logits = None, self._logits(inputs, keep, graph=graph)
        else:
            scores, logits = self._scored(inputs, prompts, keep)
        emitted = None
        if samples is not None:
            emitted = emit(
                logits,
                samples,
                shaped,
                drafts=drafts,
                rows=self._rows,
                sampler=sampler,
                acceptance=acceptance,
                exchange=self._exchange,
            )
            self._habana.mark_step()
        return PassResult(emitted=emitted, prompt=scores, num_padded_tokens=inputs.token_ids.numel())

    def warm_scores(self, bucket: Bucket) -> None:
        """Run a bucket on padding with log-probabilities of prompts."""
        one = empty_pass(bucket)
        inputs = self._passes.inputs(one, self._rows, self._tables)
        self._scored(inputs, NO_PROMPTS, np.zeros(_num_logits(self.sampling_bucket(bucket)), np.int64))

    def _scored(
        self, inputs: PassInputs, prompts: PromptPlan, keep: npt.NDArray[np.int64]
    ) -> tuple[PromptLogprobs | None, torch.Tensor]:
        """Return prompt scores (None on ranks that do not score) and the logits to keep; without a graph, since few buckets need it."""
        num_tokens = inputs.token_ids.numel()
        self._habana.mark_step()
        logits = self._logits(inputs, np.arange(num_tokens), graph=False)
        scores = None
        if self._exchange is None or self._exchange.is_output:
            scores = score_padded(logits, padded_plan(prompts, num_tokens), prompts, self._rows)
        kept = logits.index_select(0, to_device(keep, logits.device))
        self._habana.mark_step()
        return scores, kept

    def sampling_bucket(self, bucket: Bucket) -> Bucket:
        """Return the bucket whose batch size is the maximum number of sequences sampled in ``bucket``. Pure."""
        if isinstance(bucket, UnifiedBucket):
            return Bucket(min(self._max_num_seqs, bucket.query_len), self._max_steps, 0, Phase.DECODE)
        if self._max_merged and bucket.phase is Phase.PREFILL:
            return attrs.evolve(bucket, batch_size=self._max_merged)
        return bucket

    def _logits(self, inputs: PassInputs, keep: npt.NDArray[np.int64], *, graph: bool) -> torch.Tensor:
        kept = to_device(keep, inputs.token_ids.device)
        logits = self._forward(inputs.token_ids, inputs.positions, kept, inputs.tensors, graph=graph)
        self._habana.mark_step()
        return logits


def _num_logits(bucket: Bucket) -> int:
    return bucket.batch_size * (bucket.query_len if bucket.phase is Phase.DECODE else 1)


def empty_pass(bucket: Bucket) -> Pass:
    """Return a pass of padding only, which changes no state. Pure."""
    none = np.empty(0, np.int32)
    return Pass(
        bucket=bucket, indices=none, rows=none, starts=none, query_lens=none, num_logits=none, num_prompt_logits=none
    )
