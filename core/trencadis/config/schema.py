"""The whole configuration as one frozen attrs tree: one table per concern, one per noun.

Every field carries ``metadata``: ``unit`` and ``help``; flags, environment names and the reference page are made from it.
Component tables (``[bucketing.exponential]``) come from the registered components' own config classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import attrs
from attrs.validators import ge, gt, in_, le, lt

from trencadis.interfaces.setting import setting

__all__ = [
    "BUCKETING_BY_LAYOUT",
    "DEFAULT_BACKEND",
    "DEFAULT_EXECUTOR",
    "DEFAULT_TENANT",
    "EXECUTOR_OF_RANKS",
    "FOR_REPLICAS",
    "HERE",
    "STAGE_OF_SETTING",
    "BucketingConfig",
    "BudgetConfig",
    "CacheConfig",
    "Config",
    "DefragmenterConfig",
    "EmbeddingConfig",
    "EngineConfig",
    "FlightRecorderConfig",
    "LogConfig",
    "ModelConfig",
    "NounConfig",
    "ObserverConfig",
    "ParallelConfig",
    "PluginsConfig",
    "SchedulingConfig",
    "TenantConfig",
    "setting",
]

T = TypeVar("T")

HERE = ("auto", "thread")
"""Values of ``[engine] placement`` for which the core loads the engine, in the calling process; plugins offer the others."""

FOR_REPLICAS = "process"
"""What ``[engine] placement = "auto"`` becomes for several engines."""

DEFAULT_BACKEND = "torch"
"""What ``[backend] name = "auto"`` becomes if no plugin answers ``trencadis_select_backend``."""

DEFAULT_EXECUTOR = "inline"
"""What ``[executor] name = "auto"`` becomes for a model on one rank."""

EXECUTOR_OF_RANKS = "processes"
"""What ``[executor] name = "auto"`` becomes for a model that is divided over several ranks."""

BUCKETING_BY_LAYOUT: Mapping[str, str] = {"ragged": "exact", "padded": "exponential", "unified": "unified"}
"""What ``[bucketing] name = "auto"`` becomes, by the backend's batch layout: padding is paid only where graphs pay it back."""


STAGE_OF_SETTING: Mapping[str, tuple[str, tuple[object, ...]]] = {
    "engine.preemption": ("swap", ("recompute",)),
    "kv_connector.name": ("transfer", ("", "none")),
    "parallel.attention": ("partitions", ("tensor",)),
    "parallel.pipeline": ("pipeline", (1,)),
    "speculation.name": ("speculation", ("", "none")),
}
"""Stage without which a setting would be left out silently, by setting, with the values for which none is needed."""

DEFAULT_TENANT = "default"
"""The entry of every tenant that has none of its own."""


@attrs.frozen(kw_only=True)
class TenantConfig:
    """What one tenant gets. Enforced by the engine, whichever policy runs.

    A tenant is an API key's name, or what ``LLM.generate`` was told; ``key/user`` counts for ``key``.
    """

    weight: float = setting(
        1.0, "Share against other tenants, for policies that share fairly.", validator=[gt(0), lt(math.inf)]
    )
    priority: int = setting(0, "Added to the priority of each request; smaller is more urgent.")
    max_waiting: int = setting(
        0, "Most sequences that wait at once, more are refused; 0: no cap.", unit="sequences", validator=ge(0)
    )
    max_waiting_tokens: int = setting(
        0, "Most tokens of sequences that wait at once; 0: no cap.", unit="tokens", validator=ge(0)
    )


def _check_model_path(_: object, __: attrs.Attribute[str], path: str) -> None:
    if not path.strip():
        raise ValueError('must name a model: a directory, a .gguf file, a hub id, or "demo".')


@attrs.frozen(kw_only=True)
class ModelConfig:
    """Table ``[model]``: which model, and how it is held."""

    path: str = setting(
        "demo",
        'A directory, a .gguf file, a hub id, or "demo" for the model in this package.',
        validator=_check_model_path,
    )
    tokenizer: str = setting(
        "", 'Directory or hub id of the tokenizer, if it is not the model\'s own; "none": prompts are token ids.'
    )
    dtype: str = setting(
        "auto", "Of weights and activations.", validator=in_(["auto", "float32", "bfloat16", "float16"])
    )
    max_model_len: int = setting(
        0, "Longest sequence, prompt and output; 0: the model's own.", unit="tokens", validator=ge(0)
    )
    head: str = setting(
        "",
        "Head that drafts from the model's hidden states, for speculation.name = head: a directory, demo-head for the demo, or mtp for the MTP layer of the model's own files.",
    )
    revision: str = setting("", "Commit or tag of a hub id.")
    trust_remote_code: bool = setting(False, "Run model code that comes with the model.")


@attrs.frozen(kw_only=True)
class EngineConfig:
    """Table ``[engine]``: size of a step, and guards."""

    max_num_seqs: int = setting(256, "Most sequences running at once.", unit="sequences", validator=ge(1))
    max_num_batched_tokens: int = setting(2048, "Token budget of a step.", unit="tokens", validator=ge(1))
    async_scheduling: bool = setting(
        True, "Plan step n+1 while step n runs; in a pipeline, keep a batch in flight for each stage."
    )
    seed: int = setting(0, "Root of all random numbers that no request seeds itself.", validator=ge(0))
    max_wait_s: float = setting(
        60.0,
        "A sequence that waited longer is admitted before all others, whatever the policy says.",
        unit="s",
        validator=gt(0),
    )
    max_preemptions: int = setting(
        16, "A sequence preempted more often is spared while any other candidate is left.", validator=ge(1)
    )
    preemption: str = setting(
        "recompute",
        "What becomes of a sequence that loses its blocks: recompute them later, or swap them to host memory and back.",
        validator=in_(["recompute", "swap"]),
    )
    explain_steps: int = setting(
        1000,
        "What was decided in this many last steps, and why, is kept for trencadis explain; 0: nothing.",
        unit="steps",
        validator=ge(0),
    )
    warmup: bool = setting(True, "Prepare every bucket before the first request.")
    role: str = setting(
        "both",
        "prefill: compute prompts for other engines only; decode: take no prompts of others; both. Needs a KV connector that hands over.",
        validator=in_(["both", "prefill", "decode"]),
    )
    placement: str = setting(
        "auto",
        "Where the engine runs: thread (this process), process (one of its own); auto: process for the server, else thread.",
    )
    watchdog_s: float = setting(
        120.0,
        "An engine process that makes no progress for half as long is stalled: /ready says so, and its stacks are logged; after "
        "all of it, it is killed and its requests fail. Loading and compiling have no limit.",
        unit="s",
        validator=gt(0),
    )


@attrs.frozen(kw_only=True)
class ParallelConfig:
    """Table ``[parallel]``: over how many ranks a model is divided, and how many copies of it there are."""

    tensor: int = setting(1, "Ranks that share each layer.", unit="ranks", validator=ge(1))
    pipeline: int = setting(1, "Stages, each of which holds some of the layers.", unit="stages", validator=ge(1))
    expert: int = setting(
        1,
        "Ranks over which whole experts are divided: 1 (every rank holds a share of each), or as parallel.tensor.",
        unit="ranks",
        validator=ge(1),
    )
    attention: str = setting(
        "tensor",
        "How the ranks of a stage divide attention: tensor (heads), or data (sequences: each rank has some, with their KV; experts are "
        "spread, so parallel.expert has to be parallel.tensor).",
        validator=in_(["tensor", "data"]),
    )
    data: int = setting(
        1, "Copies of the model, each an engine of its own, at one address.", unit="engines", validator=ge(1)
    )
    replica: int = setting(
        0, "Which of these copies an engine is, from 0; set for each by the process that starts them.", validator=ge(0)
    )
    max_restarts: int = setting(
        3,
        "How often a copy that ended is started again within restart_window_s; beyond that it waits until the window allows it.",
        validator=ge(0),
    )
    restart_window_s: float = setting(600.0, "See max_restarts.", unit="s", validator=gt(0))


@attrs.frozen(kw_only=True)
class CacheConfig:
    """Table ``[cache]``: the KV cache, and what is kept of models between starts."""

    block_size: int = setting(0, "Tokens per KV block; 0: the backend's default.", unit="tokens", validator=ge(0))
    num_blocks: int = setting(
        0, "KV blocks of a rank; 0: as many as memory_fraction pays for.", unit="blocks", validator=ge(0)
    )
    memory_fraction: float = setting(
        0.5,
        "Share of the memory left after loading and a profile run that the KV cache may take; on a CPU see also max_bytes.",
        validator=[gt(0), le(1)],
    )
    max_bytes: int = setting(
        0,
        "Largest size of the KV cache, unless num_blocks is set; 0: no limit, except on a CPU: 4 GiB, or what all sequences at full length need if that is more.",
        unit="bytes",
        validator=ge(0),
    )
    swap_bytes: int = setting(
        4 * 2**30,
        "Host memory for blocks of preempted sequences; taken only if engine.preemption is swap.",
        unit="bytes",
        validator=ge(0),
    )
    prefix_caching: bool = setting(True, "Keep full blocks of finished prompts and outputs for reuse.")
    models: str = setting(
        "on",
        "Remember models that were loaded and proven: later starts map their packed weights from the user's cache directory.",
        validator=in_(("on", "off")),
    )
    load_timeout_s: float = setting(
        30.0, "A KV load that takes longer is given up; its tokens are computed.", unit="s", validator=gt(0)
    )
    lookup_timeout_s: float = setting(
        60.0,
        "A KV connector that is still looking for a prompt's prefix after this is asked no more about it; the prompt is computed.",
        unit="s",
        validator=gt(0),
    )
    layer_wait_s: float = setting(
        0.2,
        "A step waits no longer for KV loads that come layer by layer; one that is slower is given up, and its tokens are computed.",
        unit="s",
        validator=gt(0),
    )
    release_timeout_s: float = setting(
        60.0,
        "A KV connector that holds blocks longer than this, after a load was given up or a sequence has ended, is closed.",
        unit="s",
        validator=gt(0),
    )
    max_waiting_loads: int = setting(
        256,
        "Sequences that wait for a KV load at once; others are computed.",
        unit="sequences",
        validator=ge(1),
    )
    shared_prefixes: tuple[str, ...] = setting(
        None,
        "Beginnings of prompts, as the model sees them, whose blocks all tenants and salts share; @PATH: the text of a file.",
        factory=tuple,
    )
    key: str = setting(
        "", "Secret mixed into block hashes, so that they cannot be computed from a prompt alone.", secret=True
    )


@attrs.frozen(kw_only=True)
class DefragmenterConfig:
    """Table ``[defragmenter]``: moves KV blocks to low ids, where decode passes read blocks by range."""

    enabled: str = setting(
        "auto",
        "on or off; auto: on if the backend reads blocks by range.",
        validator=in_(["auto", "on", "off"]),
    )
    trigger: str = setting(
        "threshold",
        "threshold: move when the highest block in use is that far above their number; "
        "cost: when blocks read in vain would have paid for the move.",
        validator=in_(["threshold", "cost"]),
    )
    threshold: int = setting(32, "Gap that the threshold trigger tolerates.", unit="blocks", validator=ge(0))
    max_swaps: int = setting(512, "Most pairs of blocks moved at once.", unit="pairs", validator=ge(1))
    log_moves: bool = setting(False, "Log every move of blocks.")


@attrs.frozen(kw_only=True)
class FlightRecorderConfig:
    """Table ``[flight_recorder]``: the last steps of an engine, kept in memory and written to a file when something goes wrong."""

    num_steps: int = setting(
        2048,
        "At least so many last steps are kept, at most about twice as many; 0: none, and nothing is written.",
        unit="steps",
        validator=ge(0),
    )
    max_bytes: int = setting(
        32 * 2**20,
        "Tokens of requests that have ended are kept up to about this much, fewer steps then; they are in no file.",
        unit="bytes",
        validator=ge(2**20),
    )
    folder: str = setting(
        "", "Where files are written; empty: ~/.local/state/trencadis/flight-records, or below $XDG_STATE_HOME."
    )
    max_files: int = setting(
        8,
        "Most files of flight records of one reason in the folder, such as fault or request: the oldest go first.",
        unit="files",
        validator=ge(1),
    )
    pause_s: float = setting(
        60.0, "After a fault or a stall was written, others are not for so long.", unit="s", validator=ge(0)
    )


@attrs.frozen(kw_only=True)
class EmbeddingConfig:
    """Table ``[embedding]``: how a text becomes one vector."""

    pooling: str = setting(
        "auto",
        "Hidden states: of the last token, their mean, of the first (cls); auto: the files', else last, for encoders mean.",
        validator=in_(["auto", "last", "mean", "cls"]),
    )
    normalize: bool = setting(True, "Scale vectors to length 1.")


def _fallback(without: str) -> Any:
    return setting("", f"Component that replaces the chosen one after it raises in a step; empty: {without}.")


@attrs.frozen(kw_only=True)
class FixedNounConfig:
    """Table of a noun whose component nothing takes the place of while the engine runs: which component.

    Attributes:
        components: Config object of every registered component by its name, defaults filled in; one with a required
            value that is not given is left out unless it is named. Options of a component given by import path are a plain
            mapping under that import path.
    """

    name: str = setting("", 'The component, or "package.module:Class".')
    components: Mapping[str, Any] = attrs.field(
        factory=dict, metadata={"help": "Config objects by component name.", "unit": ""}
    )


@attrs.frozen(kw_only=True)
class NounConfig(FixedNounConfig):
    """Table of one noun: which component, and which one replaces it after an exception."""

    fallback: str = _fallback("the step fails")


@attrs.frozen(kw_only=True)
class DraftingConfig(NounConfig):
    """Tables ``[speculation]`` and ``[draft_length]``: which component makes drafts, or says how many."""

    fallback: str = _fallback("no more drafts are made")


@attrs.frozen(kw_only=True)
class AcceptanceConfig(NounConfig):
    """Table ``[acceptance]``: which rule decides on drafts."""

    fallback: str = _fallback("no draft of the step is accepted, and no more are made")


@attrs.frozen(kw_only=True)
class BucketingConfig(NounConfig):
    """Table ``[bucketing]``: which strategy, and what happens to a shape that was not prepared."""

    on_miss: str = setting(
        "fallback",
        "A pass that no prepared bucket covers: fallback compiles one while requests wait; refuse runs its requests "
        "alone, and ends with an error those that miss even then.",
        validator=in_(["fallback", "refuse"]),
    )
    complete: bool = setting(
        True,
        "Prepare one more bucket of a phase if the strategy's table leaves out a legal shape; not where misses are refused.",
    )


@attrs.frozen(kw_only=True)
class SchedulingConfig(NounConfig):
    """Table ``[scheduling]``: which policy, and which one runs beside it for comparison."""

    shadow: str = setting(
        "", "Policy asked beside the chosen one; how its choices differ is counted, none is applied; empty: none."
    )
    tenants: Mapping[str, TenantConfig] = setting(
        None,
        "Tables by tenant, such as [scheduling.tenants.alice]: weight, priority, max_waiting, max_waiting_tokens; default: of "
        "those without one.",
        factory=dict,
    )


@attrs.frozen(kw_only=True)
class RouterConfig(NounConfig):
    """Table ``[router]``: which router, and how many requests it may move between replicas."""

    fallback: str = _fallback("requests go to the replica with the fewest")
    max_moves: int = setting(
        4, "Times that one request is moved at most; after failures it moves in any case. 0: never.", validator=ge(0)
    )
    max_moves_per_s: float = setting(
        10.0,
        "Moves a second, for each replica on average; those of a second may come at once. 0: none.",
        validator=ge(0),
    )


@attrs.frozen(kw_only=True)
class ObserverConfig:
    """Table ``[observer]``: who watches."""

    names: tuple[str, ...] = setting(None, "Active observers.", factory=tuple)
    budget_ms: float = setting(
        5.0,
        "An observer slower than this on average over 100 calls is switched off for a while.",
        unit="ms",
        validator=gt(0),
    )
    components: Mapping[str, Any] = attrs.field(
        factory=dict, metadata={"help": "Config objects by component name.", "unit": ""}
    )


def _budget(default_ms: float, calls: str) -> Any:
    return setting(default_ms, f"One call of {calls}; 0: no limit.", unit="ms", validator=ge(0))


@attrs.frozen(kw_only=True)
class BudgetConfig:
    """Table ``[budget]``: how long a step waits for a call of a component before it is warned about, and then replaced.

    Three calls over the budget within a minute, or one of ten budgets, put the fallback in the component's place, for a minute the first
    time and twice as long each further time, up to an hour. Time in which the whole process stood still, or the calling thread waited
    for a processor, does not count.
    """

    scheduling_ms: float = _budget(
        200.0, "a scheduling policy; an order of n waiting sequences may take n / 4096 times as long"
    )
    eviction_ms: float = _budget(200.0, "an eviction policy")
    bucketing_ms: float = _budget(200.0, "a bucketing strategy, after the start")
    speculation_ms: float = _budget(
        1000.0, "a speculator, whose first four slow calls are forgiven; without a fallback speculation goes off"
    )
    draft_length_ms: float = _budget(200.0, "a draft length; without a fallback speculation goes off")
    kv_connector_ms: float = _budget(
        200.0, "the scheduler side of a KV connector; in place of a fallback it is switched off for a while"
    )
    kv_policy_ms: float = _budget(200.0, "a KV policy; in place of a fallback the defaults of its contract stand in")
    router_ms: float = _budget(200.0, "a router; without a fallback the least loaded replica is chosen")


@attrs.frozen(kw_only=True)
class PluginsConfig:
    """Table ``[plugins]``: what may be loaded."""

    blocked: tuple[str, ...] = setting(
        None, "Plugins never loaded: entry-point names, or distribution:name where two share one.", factory=tuple
    )
    strict: bool = setting(
        False,
        "Start nothing while an installed plugin cannot be used or two offer one name; off: only if it is asked for.",
    )
    experimental: bool = setting(False, "Accept components that are experimental; off: naming one is an error.")


@attrs.frozen(kw_only=True)
class LogConfig:
    """Table ``[log]``: what is printed."""

    level: str = setting("info", "Least severe messages shown.", validator=in_(["debug", "info", "warning", "error"]))
    format: str = setting(
        "text",
        "text: lines for people; json: one JSON object a line, for collectors; journal: text with the priority that journald reads, without "
        "the time, which it adds.",
        validator=in_(["text", "json", "journal"]),
    )


@attrs.frozen(kw_only=True)
class Config:
    """The root. Tables of nouns carry the default component's name as a string.

    Attributes:
        tables: Config objects of tables that belong to plugins, by name; see :meth:`table`.
    """

    model: ModelConfig = attrs.field(factory=ModelConfig)
    engine: EngineConfig = attrs.field(factory=EngineConfig)
    parallel: ParallelConfig = attrs.field(factory=ParallelConfig)
    cache: CacheConfig = attrs.field(factory=CacheConfig)
    defragmenter: DefragmenterConfig = attrs.field(factory=DefragmenterConfig)
    flight_recorder: FlightRecorderConfig = attrs.field(factory=FlightRecorderConfig)
    embedding: EmbeddingConfig = attrs.field(factory=EmbeddingConfig)
    bucketing: BucketingConfig = attrs.field(factory=lambda: BucketingConfig(name="auto", fallback="exact"))
    scheduling: SchedulingConfig = attrs.field(factory=lambda: SchedulingConfig(name="fair_share", fallback="fcfs"))
    eviction: NounConfig = attrs.field(factory=lambda: NounConfig(name="lru", fallback="lru"))
    sampling: NounConfig = attrs.field(factory=lambda: NounConfig(name="standard"))
    speculation: NounConfig = attrs.field(factory=lambda: DraftingConfig(name="none"))
    draft_length: NounConfig = attrs.field(factory=lambda: DraftingConfig(name="goodput"))
    acceptance: NounConfig = attrs.field(factory=lambda: AcceptanceConfig(name="match"))
    kv_connector: FixedNounConfig = attrs.field(factory=lambda: FixedNounConfig(name="none"))
    router: RouterConfig = attrs.field(factory=lambda: RouterConfig(name="prefix_affinity", fallback="least_loaded"))
    backend: FixedNounConfig = attrs.field(factory=lambda: FixedNounConfig(name="auto"))
    executor: FixedNounConfig = attrs.field(factory=lambda: FixedNounConfig(name="auto"))
    observer: ObserverConfig = attrs.field(factory=lambda: ObserverConfig(names=("log",)))
    budget: BudgetConfig = attrs.field(factory=BudgetConfig)
    plugins: PluginsConfig = attrs.field(factory=PluginsConfig)
    log: LogConfig = attrs.field(factory=LogConfig)
    tables: Mapping[str, Any] = attrs.field(factory=dict, metadata={"of_plugins": True})

    def noun(self, name: str) -> Any:
        """Return the table of a noun, of the core or of a plugin; one that chooses nothing if the configuration was made without it."""
        return getattr(self, name, None) or self.tables.get(name) or FixedNounConfig()

    def table(self, name: str, kind: type[T]) -> T:
        """Return a plugin's own table, such as ``[server]``; of its defaults if the configuration was made without plugins.

        Args:
            name: Name of the table in its ``ConfigTable``.
            kind: Config class of the table.
        """
        found: T = self.tables[name] if name in self.tables else kind()
        return found
