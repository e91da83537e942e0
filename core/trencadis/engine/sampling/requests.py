"""The configured sampler as an engine's own process asks it: made when a request first needs it, since each rank samples with one of its own."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future
from typing import Any

from trencadis.engine.request_check import check_honoured
from trencadis.engine.sampling.fingerprint import EngineFingerprint
from trencadis.engine.sampling.guarded import GuardedSampler
from trencadis.engine.stage import SamplingRules
from trencadis.errors import ContractError
from trencadis.interfaces import Sampler, SupportsPreparation
from trencadis.records import ModelFacts, RowStart, SamplingParams, parameters_in
from trencadis.registry.building import Builder

__all__ = ["Sampling", "make_sampler"]


def make_sampler(builder: Builder, rank: int) -> Sampler:
    """Return the sampler of a rank, guarded.

    Raises:
        ContractError: It does not state what it honours.
    """
    label, sampler, make_fallback = builder.guarded("sampling")
    _honoured_by(builder, sampler)
    return GuardedSampler(label, sampler, make_fallback)


class Sampling:
    """Answers questions about requests by the configured sampler.

    Args:
        builder: Makes it.
    """

    def __init__(self, builder: Builder) -> None:
        self._builder = builder
        self._made: Sampler | None = None
        self._honoured: frozenset[str] = frozenset()

    def sampler(self) -> Sampler:
        """Return a sampler in this process, which the backend's need not be; made when it is first needed."""
        if self._made is None:
            made: Sampler = self._builder.make(self._builder.plan.choices["sampling"])
            self._made, self._honoured = made, _honoured_by(self._builder, made)
        return self._made

    def check(self, params: SamplingParams) -> None:
        """Refuse what the sampler does not honour. A request of defaults needs no sampler in this process, and makes none.

        Raises:
            InvalidRequestError: A parameter would have no effect, or the sampler refuses it.
        """
        if not (params.asked or params.logits_processors or params.structured is not None):
            return
        sampler = self.sampler()
        check_honoured(params, self._honoured, self._builder.label("sampling"))
        sampler.check(params)

    def prepare(self, params: SamplingParams, tenant: str) -> tuple[Future[Any], ...]:
        """Have the sampler in this process begin what it needs for a request; made when a request needs it."""
        if params.logits_processors or params.structured is not None:
            sampler = self.sampler()
            if isinstance(sampler, SupportsPreparation):
                return sampler.prepare(params, tenant=tenant)
        return ()

    def can_start_with(self, start: RowStart, token_id: int) -> bool:
        """Return whether the sampler could have chosen a token for a sequence at the end of its prompt."""
        return self.sampler().can_start_with(start, token_id)

    def is_portable(self, params: SamplingParams) -> bool:
        """Return whether a sequence with these parameters may go on here after tokens that another engine chose."""
        return self.sampler().is_portable(params)

    def rules(self, model: ModelFacts) -> SamplingRules:
        """Return what an engine asks of the sampler."""
        return SamplingRules(
            check=self.check,
            prepare=self.prepare,
            can_start_with=self.can_start_with,
            is_portable=self.is_portable,
            fingerprint=self._fingerprint(model),
        )

    def _fingerprint(self, model: ModelFacts) -> EngineFingerprint:
        """Return what tells another engine how tokens are chosen here; that its model is the same is compared with its KV blocks."""
        facts = (self._builder.plan.hash_of("sampling"), model.vocab_size, *sorted(model.eos_token_ids))
        digest = hashlib.blake2b(repr(facts).encode(), digest_size=16).digest()
        return EngineFingerprint(digest, self.is_portable)


def _honoured_by(builder: Builder, sampler: Sampler) -> frozenset[str]:
    """Return the parameters that a sampler honours.

    Raises:
        ContractError: It states what is no parameter, or nothing at all.
    """
    component = builder.plan.choices["sampling"].component
    if sampler.honours is Sampler.honours:
        raise ContractError(
            f"{component} does not state which parameters of requests it honours: every request that sets one, such as "
            "temperature, would be refused.",
            hint=f"Set `honours` in {type(sampler).__qualname__}, to frozenset() for none.",
        )
    try:
        return parameters_in(sampler.honours)
    except ValueError as error:
        raise ContractError(f"{component} states in `honours`: {error}.", hint=component.provenance.remedy) from error
