"""Makes engine requests of a workload's: tokens that are equal where the workload says that contents are equal."""

from __future__ import annotations

from collections.abc import Sequence

from trencadis.errors import ConfigValueError
from trencadis.records import Request, SamplingParams
from trencadis_tools.workloads.workload import Workload

__all__ = ["Prompts"]


class Prompts:
    """Makes the requests of a workload. Pure: the same workload gives the same tokens on every machine.

    Token 0 ends texts. The text of request i is the token ``i + 2``, and so is what its prompt shares with nobody; blocks that requests
    share have tokens after those.

    Args:
        workload: The requests.
    """

    def __init__(self, workload: Workload) -> None:
        self._requests = workload.requests
        self._block_tokens = workload.block_tokens
        self._longest = max(one.num_output_tokens for one in workload.requests)
        numbers: dict[int, int] = {}
        for one in workload.requests:
            for block in one.block_ids:
                numbers.setdefault(block, len(numbers))
        self._token_of = {block: len(self._requests) + 2 + number for block, number in numbers.items()}
        self.vocab_size = len(self._requests) + 2 + len(numbers)

    def request(self, index: int, before: Sequence[int] = ()) -> Request:
        """Return a request as it is sent.

        Args:
            index: In the workload.
            before: Tokens of prompt and answer that it follows.

        Raises:
            ConfigValueError: It has no room for them.
        """
        asked = self._requests[index]
        tokens = list(before)
        for block in asked.block_ids:
            tokens += [self._token_of[block]] * self._block_tokens
        length = asked.num_prompt_tokens
        if len(before) > length:
            raise ConfigValueError(
                f"request {asked.request_id!r} of the workload: its prompt of {length} tokens is to begin with the prompt and answer of "
                f"{asked.after!r}, which are {len(before)} tokens.",
                hint="num_prompt_tokens counts what comes before as well.",
            )
        del tokens[length:]
        tokens += [index + 2] * (length - len(tokens))
        return Request(
            request_id=asked.request_id,
            prompt_token_ids=tuple(tokens),
            params=SamplingParams(max_tokens=asked.max_tokens or self._longest, seed=index),
            priority=asked.priority,
            tenant=asked.tenant,
            ttft_target_s=asked.ttft_target_s,
            tpot_target_s=asked.tpot_target_s,
        )
