"""The greedy sampler: argmax for every row."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from trencadis.interfaces import Distributions, Sampled, Sampler, SamplingContext
from trencadis.records import RowStart, SamplingParams
from trencadis_plugins.sampling.arithmetic import likeliest
from trencadis_plugins.sampling.distributions import KeyedDistributions, distributions_of
from trencadis_plugins.sampling.guard import RowFailures
from trencadis_plugins.sampling.logprobs import LogprobReporter

__all__ = ["GreedySampler"]


class GreedySampler(Sampler):
    """Always chooses the most likely token, the lowest id of equals.

    Requests that ask for another temperature than 0 or the default, for masks, bias or penalties are refused; log-probabilities are
    reported. For measurements in which sampling must cost nothing and every run must give the same text.
    """

    honours = frozenset({"greedy", "logprobs"})
    isolates_rows = True
    _is_static = False

    def use_static_shapes(self) -> tuple[SamplingParams, ...]:
        """Use static shapes from now on: with log-probabilities or without."""
        self._is_static = True
        return tuple(SamplingParams(temperature=0.0, logprobs=logprobs) for logprobs in (None, 1))

    def allocate(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Make room for ``num_rows`` sequences."""
        self._reporter = LogprobReporter(num_rows)

    def start_row(self, start: RowStart) -> None:
        """Record whether log-probabilities are requested."""
        self._reporter.start_row(start)

    @torch.no_grad()
    def sample(self, logits: torch.Tensor, context: SamplingContext) -> Sampled:
        """Choose the most likely token of each logits row.

        Args:
            logits: ``[L, V]`` in the model's dtype; changed only where they hold NaN or infinity.
            context: Whose they are.

        Returns:
            Errors of rows whose logits hold NaN or infinity, among the rest.
        """
        failures = RowFailures()
        token_ids = likeliest(logits)
        logits = failures.check_logits(logits, context, largest=token_ids)
        if self._is_static:
            kept = self._reporter.keep_all(logits, context)
            logprobs = self._reporter.report_all(kept, token_ids)
        else:
            logprobs = self._reporter.report(self._reporter.keep(logits, context), token_ids)
        return Sampled(token_ids=token_ids, logprobs=logprobs, **failures.fields(context))

    def supports_drafts(self, params: SamplingParams, *, branching: bool) -> bool:
        """Return True: no parameter that is accepted has an effect."""
        return True

    def is_portable(self, params: SamplingParams) -> bool:
        """Return True: no parameter has an effect."""
        return True

    @torch.no_grad()
    def verify(
        self, logits: torch.Tensor, context: SamplingContext, choose: Callable[[Distributions], torch.Tensor]
    ) -> Sampled:
        """Apply an acceptance rule to one-hot distributions at the most likely token; otherwise as :meth:`sample`."""
        failures = RowFailures()
        logits = failures.check_logits(logits, context)
        keep, report = self._reporter.keep, self._reporter.report
        if self._is_static:
            keep, report = self._reporter.keep_all, self._reporter.report_all
        raw = keep(logits, context)
        is_greedy = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
        keys = np.zeros((len(logits), 2), np.int64)
        distributions = distributions_of(logits.float(), is_greedy=is_greedy)
        token_ids = choose(KeyedDistributions(distributions, keys=keys, positions=context.positions))
        return Sampled(token_ids=token_ids, logprobs=report(raw, token_ids), **failures.fields(context))
