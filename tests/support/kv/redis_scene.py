"""Whole engines with a cache in Redis: prompts, what they cost, and what lies in the server afterwards."""

from __future__ import annotations

from typing import Any

from support.kv.redis_server import RedisServer
from trencadis.interfaces import ComponentContext, ConnectorPair
from trencadis.records import ModelFacts, Request, SamplingParams
from trencadis_kv.connectors.redis.config import RedisConfig
from trencadis_kv.connectors.redis.connector import make_redis
from trencadis_kv.interfaces import KVPolicy
from trencadis_kv.store.defaults import IdentityCodec
from trencadis_testing.kv_suite import ConnectorSuite, EngineUnderTest, again
from trencadis_testing.workloads import Arrival, wrong_texts

__all__ = [
    "ALL_BYTES",
    "FACTS",
    "NUM_PROMPTS",
    "OBJECT_BYTES",
    "PROMPT_BLOCKS",
    "Scene",
    "block_keys",
    "failures",
    "served",
    "warm",
]

FACTS = ModelFacts(
    architecture="Fake",
    dtype="float32",
    vocab_size=97,
    max_model_len=256,
    eos_token_ids=(0,),
    num_parameters=0,
    weights_bytes=0,
    kv_bytes_per_token=24,
    fingerprint="one",
)
NUM_PROMPTS, PROMPT_BLOCKS = 4, 12
OBJECT_BYTES = 128 + 3 * 4 * 8
"""A header, and four tokens of three arrays of integers."""
ALL_BYTES = (NUM_PROMPTS - 1) * PROMPT_BLOCKS * OBJECT_BYTES


class Always(KVPolicy):
    """Takes whatever there is: a cost model knows nothing of simulated time."""


class Scene(ConnectorSuite):
    """Engines with connectors to one port.

    Args:
        port: Of a server, or of a way to one.
        facts: Of the model.
        settings: Of the connector.
    """

    has_threads = True

    def __init__(self, port: int, *, facts: ModelFacts = FACTS, **settings: Any) -> None:
        # A breaker would keep a test from seeing the second fault.
        given = {"url": f"redis://127.0.0.1:{port}", "failure_limit": 1000, "io_timeout_s": 0.3, **settings}
        self._config = RedisConfig(**given)
        self._facts = facts

    def make(self) -> ConnectorPair:
        """Return a connector."""
        parts = {"kv_codec": IdentityCodec, "kv_policy": Always}
        context = ComponentContext(clock=self.clock, seed=0, model=self._facts, make=lambda noun, name: parts[noun]())
        return make_redis(self._config, context)

    def engine(self, pair: ConnectorPair | None = None, **options: Any) -> Any:
        """Return an engine without a prefix cache of its own."""
        return super().engine(pair, **{"prefix_caching": False, **options})


def prompts() -> list[Arrival]:
    """Return prompts of whole blocks and one token more, the last two with a common beginning. Pure."""
    todo = []
    for number in range(NUM_PROMPTS):
        first = min(number, NUM_PROMPTS - 2)
        tokens = [1 + (first * 17 + at * at) % 96 for at in range(PROMPT_BLOCKS * 4)] + [1 + number]
        params = SamplingParams(max_tokens=3)
        todo.append(Arrival(number * 2, Request(request_id=f"{number}", prompt_token_ids=tuple(tokens), params=params)))
    return todo


def served(one: EngineUnderTest, mark: str, **options: Any) -> int:
    """Serve all prompts, check the texts, and return how many of their tokens were loaded."""
    todo = again(prompts(), mark=mark)
    found = one.serve(todo, **options)
    assert wrong_texts(found, todo) == []
    one.rest()
    return sum(end.num_cached_tokens for end in found.ends.values())


def failures(pair_metrics: str) -> dict[str, float]:
    """Return failures by cause. Pure."""
    lines = [line for line in pair_metrics.splitlines() if line.startswith("trencadis_kv_transfer_failures_total")]
    return {line.split('cause="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


def block_keys(server: RedisServer) -> list[str]:
    """Return the keys of blocks, in order; beside them is a description of the layout."""
    return sorted(key.decode() for key in server.run("KEYS", "*") if len(key.rsplit(b"/")[-1]) == 64)


def warm(scene: Scene, server: RedisServer) -> None:
    """Have all prompts saved."""
    with scene.engine() as one:
        assert served(one, "warm") <= PROMPT_BLOCKS * 4  # the common beginning may be loaded already
    # One prompt has all its blocks in common with the one before; the outputs fill no block.
    assert len(block_keys(server)) == (NUM_PROMPTS - 1) * PROMPT_BLOCKS
