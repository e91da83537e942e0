"""Engine requests of a workload: token ids that share exactly what the workload says is shared.

A block id gives the same tokens at any position, so equal heads of ``block_ids`` are equal tokens, and equal blocks of an engine
with any block size. Tokens beyond the blocks are drawn for the request alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trencadis.errors import ConfigError
from trencadis.records import Request, SamplingParams
from trencadis_tools.workloads.draws import Stream, keyed_hash
from trencadis_tools.workloads.workload import Workload

__all__ = ["NUM_RESERVED_TOKENS", "Prompts"]

NUM_RESERVED_TOKENS = 2
"""Token ids 0 and 1 are not drawn for prompts, since a simulated engine ends outputs with 0."""


class Prompts:
    """Makes requests of a workload for an engine. Pure: the same call returns the same tokens.

    Args:
        workload: Workload with the requests.
        vocab_size: Vocabulary size of the model, at least 3. With a vocabulary of few tokens, different blocks may be equal by
            chance: two blocks of n tokens with probability ``(vocab_size - 2) ** -n``.

    Raises:
        ConfigError: The vocabulary has no token that is not reserved.
    """

    def __init__(self, workload: Workload, *, vocab_size: int) -> None:
        if vocab_size <= NUM_RESERVED_TOKENS:
            raise ConfigError(
                f"a vocabulary of {vocab_size} tokens has none for prompts.",
                hint=f"Take a model with more than {NUM_RESERVED_TOKENS} tokens.",
            )
        self._workload = workload
        self._num_tokens = vocab_size - NUM_RESERVED_TOKENS
        self._by_id = {request.request_id: request for request in workload.requests}
        self._longest_output = max(request.num_output_tokens for request in workload.requests)

    def request(self, index: int, before: Sequence[int] = ()) -> Request:
        """Return request ``index`` for an engine: greedy, with the ``max_tokens`` that policies see. Pure.

        Its seed is its index, which identifies it to a simulated device. The prefix cache is not divided by tenants, since the workload
        defines what is shared.

        Args:
            index: Index in ``workload.requests``.
            before: Prompt and answer token ids of the request that it follows; empty if it follows none.
        """
        asked = self._workload.requests[index]
        return Request(
            request_id=asked.request_id,
            prompt_token_ids=self.token_ids(index, before),
            params=SamplingParams(max_tokens=asked.max_tokens or self._longest_output, temperature=0.0, seed=index),
            priority=asked.priority,
            tenant=asked.tenant,
            cache_salt="",
            ttft_target_s=asked.ttft_target_s,
            tpot_target_s=asked.tpot_target_s,
        )

    def token_ids(self, index: int, before: Sequence[int] = ()) -> tuple[int, ...]:
        """Return the prompt of request ``index``. Pure.

        Args:
            index: Index in ``workload.requests``.
            before: Prompt and answer token ids of the request that it follows. If it continues that request, its prompt begins with
                them, followed by the workload's number of new tokens, even if the answer has another length than in the workload.
        """
        asked = self._workload.requests[index]
        if asked.continues:
            previous = self._by_id[asked.after]
            num_own = asked.num_prompt_tokens - previous.num_prompt_tokens - previous.num_output_tokens
            return (*before, *self._drawn(Stream.OWN_TOKENS, [index], num_own))
        shared = self._drawn(Stream.BLOCKS, asked.block_ids, self._workload.block_tokens)[: asked.num_prompt_tokens]
        return tuple(shared + self._drawn(Stream.OWN_TOKENS, [index], asked.num_prompt_tokens - len(shared)))

    def _drawn(self, stream: Stream, keys: Sequence[int], num_tokens: int) -> list[int]:
        """Return ``num_tokens`` tokens for each key, concatenated; independent of other streams and seeds."""
        if not keys or not num_tokens:
            return []
        rows = keyed_hash(self._workload.seed, int(stream), np.asarray(keys, np.uint64))
        hashes = keyed_hash(rows[:, None], np.arange(num_tokens, dtype=np.uint64))
        tokens = hashes % np.uint64(self._num_tokens) + np.uint64(NUM_RESERVED_TOKENS)
        return tokens.ravel().tolist()
