"""Generated configurations: any subset of the features, any strategies, and sizes at which everything is scarce."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any

import attrs
from hypothesis import strategies as st

from support.machine.chaos import Backend, Chaos, Inline, ManualClock, Staged, taken
from trencadis.config import Config
from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Component, ConnectorPair, Lookup, SupportsPreparation, SupportsRemotePrefill
from trencadis.records import PARAMETER_GROUPS, FirstToken, Request, SamplingParams
from trencadis.registry import Registry, load_with_plugins
from trencadis_testing.backend import ArgmaxSampler
from trencadis_testing.doubles import LoopConnector, ScriptedSpeculator, ScriptedTrees
from trencadis_testing.fakes import FakeBackend, fake_text

__all__ = ["BLOCK_SIZE", "POLICIES", "VOCAB_SIZE", "Store", "World", "numbered", "worlds"]

BLOCK_SIZE = 4
VOCAB_SIZE = 4096
POLICIES = (
    "fcfs",
    "prefill_first",
    "priority",
    "shortest_first",
    "fair_share",
    "deadline",
    "prefix_affinity",
    "multi_level",
)
EVICTIONS = ("lru", "lfu", "slru", "arc", "two_queue", "s3_fifo", "ttl", "cost_aware")
BUCKETINGS: Mapping[str, tuple[str, ...]] = {
    "ragged": ("exact", "exponential"),
    "padded": ("exponential", "linear", "padding_aware"),
    "contiguous": ("exponential", "linear", "padding_aware"),
    "merged": ("exponential", "linear", "padding_aware"),
    "unified": ("unified",),
}
"""Bucketing strategies by layout; contiguous and merged are kinds of the padded one."""

PREEMPTIVE: Mapping[str, Any] = {"priority": {"preempt": True}, "multi_level": {"preempt": True}}
"""Options of policies that preempt for requests that wait."""


@attrs.frozen(kw_only=True)
class Store:
    """A KV connector with a store of its own, :class:`LoopConnector`.

    Attributes:
        delay: Steps that a load takes.
        pending: Look-ups before one is answered.
        holds: It holds the blocks of finished sequences for a while.
        by_layer: Loads come layer by layer.
        lies: Every third load fails behind some tokens.
        brings_first_tokens: Every second hit comes with the first token.
        is_remote: It has requests of other engines.
    """

    delay: int = 1
    pending: int = 0
    holds: bool = False
    by_layer: bool = False
    lies: bool = False
    brings_first_tokens: bool = False
    is_remote: bool = False


@attrs.frozen(kw_only=True, repr=False)
class World:
    """A configuration of an engine over a fake model. Its representation makes it again.

    Attributes:
        layout: Key of :data:`BUCKETINGS`.
        num_words: The model's texts are made of so many tokens; few make drafts and stop tokens common.
        has_end: Token 2 ends a text.
        engine: Fields of ``[engine]``.
        cache: Fields of ``[cache]``.
        swap_blocks: Blocks that host memory has room for; 0: preempted sequences are recomputed.
        max_prefill_batch_size: Of the backend.
        scheduling: The policy.
        shadow: Another beside it; empty: none.
        has_tenants: Tenants have entries, one of them with a cap.
        eviction: The policy.
        bucketing: The strategy.
        refuses_misses: A pass without a prepared bucket is refused.
        speculation: ``none``, ``ngram``, ``suffix``, ``suffix_tree``, ``mixed``, ``line`` or ``tree``: the last two are scripted.
        draft_length: How many drafts.
        store: The KV connector, if there is one.
        role: Of the engine, with a store.
        num_stages: Of a pipeline.
        num_ranks: Ranks with sequences of their own.
        defragmenter: ``off``, ``threshold`` or ``cost``.
        flight_steps: Steps that the flight recorder keeps; 0: none.
        observers: Their names.
        prepares: Requests with a grammar wait for the sampler.
    """

    layout: str = "ragged"
    num_words: int = 29
    has_end: bool = False
    engine: Mapping[str, Any] = attrs.field(factory=dict)
    cache: Mapping[str, Any] = attrs.field(factory=dict)
    swap_blocks: int = 0
    max_prefill_batch_size: int = 1
    scheduling: str = "fcfs"
    shadow: str = ""
    has_tenants: bool = False
    eviction: str = "lru"
    bucketing: str = "exact"
    refuses_misses: bool = False
    speculation: str = "none"
    draft_length: str = "fixed"
    store: Store | None = None
    role: str = "both"
    num_stages: int = 1
    num_ranks: int = 1
    defragmenter: str = "off"
    flight_steps: int = 0
    observers: tuple[str, ...] = ()
    prepares: bool = False

    def __repr__(self) -> str:
        default = World()
        given = {one.name: getattr(self, one.name) for one in attrs.fields(World)}
        return (
            f"World({', '.join(f'{k}={v!r}' for k, v in given.items() if k == 'layout' or v != getattr(default, k))})"
        )

    @property
    def num_blocks(self) -> int:
        """KV blocks of a rank."""
        return int(self.cache.get("num_blocks", 40))

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence: it has room alone."""
        return min(48, self.num_blocks * BLOCK_SIZE)

    @property
    def max_num_seqs(self) -> int:
        """Rows of all ranks."""
        return int(self.engine.get("max_num_seqs", 4)) * self.num_ranks

    @property
    def token_budget(self) -> int:
        """Most tokens of a step."""
        return int(self.engine.get("max_num_batched_tokens", 24))

    @property
    def eos(self) -> int:
        """The token that ends a text; -1: none."""
        return 2 if self.has_end else -1

    @property
    def fallback(self) -> str:
        """The scheduling policy that takes the place of one that fails."""
        return "priority" if self.scheduling == "fcfs" else "fcfs"

    def text(self, tokens: Iterable[int], num_tokens: int) -> list[int]:
        """Return how the model continues a text, past any end."""
        return fake_text(list(tokens), num_tokens, vocab_size=self.num_words, eos=-1)

    def _sound(self) -> World:
        own = BUCKETINGS[self.layout]
        changes: dict[str, Any] = {
            "bucketing": self.bucketing if self.bucketing in own else own[len(self.bucketing) % len(own)]
        }
        if self.num_stages > 1 or self.num_ranks > 1:
            changes |= {"store": None}
        if self.num_stages > 1:
            changes |= {"num_ranks": 1}
        if changes.get("store", self.store) is None:
            changes |= {"role": "both"}
        if self.speculation == "tree" and self.layout != "ragged":
            changes |= {"speculation": "line"}
        if self.speculation == "suffix_tree" and self.layout != "ragged":
            changes |= {"speculation": "suffix"}
        if changes.get("store", self.store) is not None:  # it knows blocks by their ids
            changes |= {"defragmenter": "off"}
        if self.refuses_misses and (self.layout == "ragged" or not self.engine.get("warmup")):
            changes |= {"refuses_misses": False}
        return attrs.evolve(self, **changes)

    # ------------------------------------------------------------------------------------------------ building

    def tables(self) -> dict[str, Any]:
        """Return the tables of the configuration."""
        sizes = {"max_num_seqs": self.max_num_seqs, "max_num_batched_tokens": self.token_budget}
        preemption = "swap" if self.swap_blocks else "recompute"
        tenants = {
            "a": {"weight": 2.0, "max_waiting": 3},
            "b": {"priority": -1, "max_waiting_tokens": 60},
            "default": {"weight": 0.5},
        }
        draws_tree = self.speculation == "suffix_tree"
        return {
            "engine": {
                "warmup": False,
                "placement": "thread",
                **self.engine,
                **sizes,
                "preemption": preemption,
                "role": self.role,
            },
            "parallel": {
                "pipeline": self.num_stages,
                "tensor": self.num_ranks,
                "expert": self.num_ranks,
                "attention": "data" if self.num_ranks > 1 else "tensor",
            },
            "cache": {"num_blocks": 40, **self.cache, "block_size": BLOCK_SIZE, "swap_bytes": 64 * self.swap_blocks},
            "scheduling": {
                "name": self.scheduling,
                "fallback": self.fallback,
                "shadow": self.shadow,
                "tenants": tenants if self.has_tenants else {},
                **PREEMPTIVE,
            },
            "eviction": {"name": self.eviction, "fallback": "lfu" if self.eviction == "lru" else "lru"},
            "bucketing": {
                "name": self.bucketing,
                "fallback": "exponential" if self.bucketing == "exact" else "exact",
                "on_miss": "refuse" if self.refuses_misses else "fallback",
            },
            "speculation": {
                "name": "suffix" if draws_tree else self.speculation,
                "suffix": {"tree": draws_tree, "min_prob": 0.0},
            },
            "draft_length": {"name": self.draft_length},
            "sampling": {"name": "machine" if self.prepares else "standard"},
            "kv_connector": {"name": "none" if self.store is None else "machine"},
            "backend": {"name": "machine"},
            "executor": {"name": "machine"},
            "defragmenter": {"enabled": "off"}
            if self.defragmenter == "off"
            else {"enabled": "on", "trigger": self.defragmenter, "threshold": 2},
            "flight_recorder": {"num_steps": self.flight_steps},
            "observer": {"names": list(self.observers)},
        }

    def configure(self, chaos: Chaos, clock: ManualClock) -> tuple[Config, Registry]:
        """Return configuration and plugins of this world, whose components fail when they are told to."""
        overrides = {"model": {"path": "demo"}, **self.tables()}
        resolved, registry = load_with_plugins(overrides=overrides, extra_plugins=[_Parts(self, chaos, clock)])
        chaos.sizes = {"token_budget": self.token_budget, "max_num_seqs": self.max_num_seqs}
        chaos.num_ranks = self.num_ranks
        chaos.follow(registry)
        return resolved.config, registry


class _Parts:
    """The plugin with what only a world has: a fake model and scripted components."""

    def __init__(self, world: World, chaos: Chaos, clock: ManualClock) -> None:
        self._world, self._chaos, self._clock = world, chaos, clock

    @hookimpl
    def trencadis_backends(self) -> Iterable[Component]:
        provides = {"backend.adapters", "backend.pipeline", "backend.expert", "backend.data_attention"}
        if self._world.layout == "ragged":
            provides |= {"backend.tree_attention"}
        yield _component("backend", self._backend, provides=frozenset(provides))

    @hookimpl
    def trencadis_executors(self) -> Iterable[Component]:
        world = self._world
        is_spread = world.num_stages > 1 or world.num_ranks > 1
        provides = frozenset({"executor.ranks"} if is_spread else ())
        yield _component("executor", self._executor, provides=provides)

    @hookimpl
    def trencadis_samplers(self) -> Iterable[Component]:
        yield _component("sampling", lambda: _PreparingSampler(self._chaos))

    @hookimpl
    def trencadis_speculators(self) -> Iterable[Component]:
        yield _component("speculation", lambda: ScriptedSpeculator(self._line), name="line")
        yield _component("speculation", lambda: ScriptedTrees(self._tree), name="tree")

    @hookimpl
    def trencadis_kv_connectors(self) -> Iterable[Component]:
        if self._world.store is not None:
            yield _component("kv_connector", lambda: _connector(self._world, self._chaos))

    def _backend(self) -> FakeBackend:
        world = self._world
        return Backend(
            num_ranks=world.num_ranks,
            layout="padded" if world.layout in ("merged", "contiguous") else world.layout,
            merges_prefills=world.layout == "merged",
            contiguous=world.layout == "contiguous",
            vocab_size=VOCAB_SIZE,
            num_words=world.num_words,
            eos=world.eos,
            max_model_len=world.max_model_len,
            max_prefill_batch_size=world.max_prefill_batch_size,
            fails=self._chaos.run,
            fails_to_swap=self._chaos.copy,
        )

    def _executor(self) -> Inline | Staged:
        if self._world.num_stages == 1:
            return Inline(self._chaos)
        return Staged(self._chaos, clock=self._clock, num_stages=self._world.num_stages, make_backend=self._backend)

    def _line(self, tokens: Any) -> list[int]:
        """Draft what comes, but for one draft that is wrong, at another place each time or nowhere."""
        true, wrong = self._world.text(tokens.tolist(), 3), len(tokens) % 4
        return [token if place != wrong else (token + 1) % self._world.num_words for place, token in enumerate(true)]

    def _tree(self, tokens: Any) -> list[tuple[int, int]]:
        """Draft two tokens that come, each beside one that may not."""
        first, second = self._world.text(tokens.tolist(), 2)
        return [(3, -1), (first, -1), (5, 1), (second, 1)]


def _component(noun: str, make: Any, *, name: str = "machine", provides: frozenset[str] = frozenset()) -> Component:
    return Component(
        name=name,
        factory=lambda config, context: make(),
        summary="A part of a generated world.",
        interface_version=1,
        provides=provides,
    )


class _PreparingSampler(ArgmaxSampler, SupportsPreparation):
    """Takes every parameter, and a while before a request with a grammar can run."""

    honours = frozenset(PARAMETER_GROUPS)

    def __init__(self, chaos: Chaos) -> None:
        self._chaos = chaos

    def check(self, params: SamplingParams) -> None:
        """Take grammars, too."""

    def prepare(self, params: SamplingParams, *, tenant: str) -> tuple[Future[Any], ...]:
        """Leave it to the history when a grammar is ready."""
        if params.structured is None:
            return ()
        self._chaos.preparations.append(Future())
        return (self._chaos.preparations[-1],)


def _connector(world: World, chaos: Chaos) -> ConnectorPair:
    """Return a connector with a store, as the world says."""
    store = world.store
    assert store is not None
    lies: dict[int, int | None] = {0: None, 1: 4, 2: None, 3: None, 4: 0, 5: None}
    connector = LoopConnector(
        block_size=BLOCK_SIZE,
        delay=store.delay,
        pending=store.pending,
        holds=store.holds,
        by_layer=store.by_layer,
        fail=lambda transfer_id: lies[transfer_id % 6] if store.lies else None,
    )

    class Side(type(connector.scheduler)):  # type: ignore[misc] # the kit's own
        def lookup(self, request: Request, **known: Any) -> Lookup:
            found: Lookup = super().lookup(request, **known)
            if not store.brings_first_tokens or not found.num_tokens or found.transfer_id % 2:
                return found
            (token,) = world.text(request.prompt_token_ids, 1)
            return attrs.evolve(found, first_token=FirstToken(token_id=token))

        def finished_params(self, request: Request) -> Mapping[str, Any] | None:
            return request.transfer_params

    class RemoteSide(Side, SupportsRemotePrefill):
        def on_waker(self, wake: Any) -> None:
            chaos.wake = wake

        def take_requests(self) -> Any:
            return taken(chaos.remote)

        def on_request_token(self, request_id: str, first: FirstToken) -> None:
            chaos.remote_tokens.append((request_id, first.token_id))

        def on_request_ended(self, request_id: str, *, transfer_params: Any, error: str) -> None:
            chaos.remote_ends.append((request_id, error))

    connector.scheduler.__class__ = RemoteSide if store.is_remote else Side
    return connector.pair()


# ------------------------------------------------------------------------------------------------------ drawing


def sound(world: World) -> World:
    """Return the nearest world that can be: layouts have their strategies, and some features exclude each other. Pure."""
    return world._sound()


def worlds() -> st.SearchStrategy[World]:
    """Draw a world."""
    return st.integers(0, 2**32 - 1).map(numbered)


def numbered(number: int) -> World:
    """Return one of 2**32 worlds: every value of a field is as likely whatever the others are, which Hypothesis' own draws are not. Pure."""
    rng = random.Random(number)
    pick = rng.choice
    engine = {
        "max_num_seqs": pick([4, 2, 6, 1]),
        "max_num_batched_tokens": pick([24, 6, 64, 12, 3]),
        "async_scheduling": pick([False, True]),
        "max_wait_s": pick([60.0, 0.5]),
        "max_preemptions": pick([16, 1]),
        "explain_steps": pick([0, 1000, 3]),
        "warmup": pick([False, True]),
    }
    cache = {
        "num_blocks": pick([12, 9, 14, 20, 40]),
        "prefix_caching": pick([False, True]),
        "load_timeout_s": pick([30.0, 0.4]),
        "lookup_timeout_s": pick([60.0, 0.3]),
        "release_timeout_s": pick([1e6, 3.0]),
        "max_waiting_loads": pick([256, 1, 2]),
        "layer_wait_s": 0.01,
    }
    store = Store(
        delay=pick([1, 3]),
        pending=pick([0, 1, 3]),
        holds=pick([False, True]),
        by_layer=pick([False, True]),
        lies=pick([False, True]),
        brings_first_tokens=pick([False, False, True]),
        is_remote=pick([False, False, True]),
    )
    world = World(
        layout=pick(["ragged", "ragged", "padded", "unified", "contiguous", "merged"]),
        num_words=pick([29, 3, VOCAB_SIZE]),
        has_end=pick([False, True]),
        engine=engine,
        cache=cache,
        swap_blocks=pick([0, 64, 6]),
        max_prefill_batch_size=pick([1, 2]),
        scheduling=pick(POLICIES),
        shadow=pick(["", "", *POLICIES]),
        has_tenants=pick([False, True]),
        eviction=pick(EVICTIONS),
        bucketing=pick(["exact", "exponential", "linear", "padding_aware"]),
        refuses_misses=pick([False, False, True]),
        speculation=pick(["none", "none", "line", "tree", "ngram", "suffix", "suffix_tree", "mixed"]),
        draft_length=pick(["fixed", "goodput", "table"]),
        store=pick([None, store]),
        role=pick(["both", "both", "both", "decode", "prefill"]),
        num_stages=pick([1, 1, 1, 1, 1, 1, 2, 3]),
        num_ranks=pick([1, 1, 1, 1, 1, 1, 2, 3]),
        defragmenter=pick(["off", "threshold", "cost"]),
        flight_steps=pick([0, 64]),
        observers=pick([(), ("prometheus",), ("prometheus", "log")]),
        prepares=pick([False, False, True]),
    )
    return sound(world)
