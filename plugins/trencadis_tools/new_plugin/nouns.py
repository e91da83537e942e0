"""Facts of each noun, and of stages, for the templates: its contract, the starting component's option and factory."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from trencadis.hookspecs import NOUNS
from trencadis_kv import NOUNS as NOUNS_OF_KV

__all__ = ["HOOKS", "STAGE", "STARTS", "Option", "Start"]

HOOKS: Mapping[str, str] = {**NOUNS, **{noun.name: noun.hook for noun in NOUNS_OF_KV}}
"""Register hook of each noun."""

STAGE = "stage"
"""What is no noun, and a kind of plugin all the same."""


@attrs.frozen
class Option:
    """The one option of a starting component.

    Attributes:
        name: Key in the config table.
        type: Type of the value.
        default: Default value, in a form valid in both Python and TOML.
        validator: Expression that calls one of ``attrs.validators``.
        help: Help text, one sentence.
        unit: Unit, such as ``tokens``; empty: none.
    """

    name: str
    type: str
    default: str
    validator: str
    help: str
    unit: str = ""


@attrs.frozen
class Start:
    """The component that a new plugin of a noun starts with.

    Attributes:
        contract: Name of the class that the factory returns.
        summary: Summary of the component, one line.
        option: Option of the component.
        maker: Name that the factory imports from the component's module; ``{class}`` is replaced by the class name.
        call: Expression of the factory that makes the component.
        example: Value of the option that switches a stage on.
    """

    contract: str
    summary: str
    option: Option
    maker: str = "{class}"
    call: str = "{class}(config)"
    example: str = ""


STARTS: Mapping[str, Start] = {
    "bucketing": Start(
        "BucketingStrategy",
        "Sizes that grow by a constant factor in every dimension.",
        Option("growth", "float", "2.0", "gt(1.0)", "Each size is this many times the one before."),
        call="{class}.from_context(config, context)",
    ),
    "scheduling": Start(
        "SchedulingPolicy",
        "Short prompts before long ones, each by arrival.",
        Option("long_prompt_tokens", "int", "512", "ge(1)", "A prompt of so many tokens counts as long.", "tokens"),
    ),
    "eviction": Start(
        "EvictionPolicy",
        "The beginnings of prompts, which others may share, go last.",
        Option("protected_depth", "int", "4", "ge(0)", "So many blocks from the start go last.", "blocks"),
    ),
    "sampling": Start(
        "Sampler",
        "The standard sampler, and no token far below the best one.",
        Option("num_sigmas", "float", "0.0", "ge(0.0)", "Most standard deviations below the best logit; 0: no limit."),
        maker="make_sampler",
        call="make_sampler(config)",
    ),
    "speculation": Start(
        "Speculator",
        "Drafts what followed the last few tokens when they last occurred.",
        Option("max_draft_tokens", "int", "3", "ge(1)", "Most drafts of a sequence in a step.", "tokens"),
    ),
    "draft_length": Start(
        "DraftLength",
        "As many drafts as may be while few sequences decode, and none beyond.",
        Option("max_sequences", "int", "8", "ge(1)", "With more decoding sequences nothing is drafted."),
    ),
    "acceptance": Start(
        "AcceptanceRule",
        "Drafts stand while the sampler chooses them too, up to a number of them.",
        Option("max_accepted", "int", "8", "ge(1)", "Most drafts of a sequence that stand in a step.", "tokens"),
    ),
    "kv_connector": Start(
        "ConnectorPair",
        "Keeps KV blocks in host memory after the device has forgotten them.",
        Option("max_blocks", "int", "4096", "ge(1)", "Most blocks kept; the least recently used go first.", "blocks"),
        maker="make_pair",
        call="make_pair(config, context)",
    ),
    "kv_codec": Start(
        "KVCodec",
        "Deflates KV blocks, which any Python can inflate.",
        Option("level", "int", "1", "ge(1)", "How hard it tries, 1 to 9."),
    ),
    "kv_policy": Start(
        "KVPolicy",
        "Leaves short prefixes alone: computing them is quicker than asking for them.",
        Option("min_tokens", "int", "256", "ge(1)", "A prefix of fewer tokens is computed.", "tokens"),
    ),
    "router": Start(
        "Router",
        "Takes turns among replicas that have hardly more requests than others.",
        Option("max_extra", "int", "4", "ge(0)", "Replicas with so many requests more than the fewest count as equal."),
    ),
    "backend": Start(
        "Backend",
        "A toy model in NumPy: the place for a device of your own.",
        Option("vocab_size", "int", "4096", "ge(32)", "Number of tokens the toy model knows.", "tokens"),
    ),
    "executor": Start(
        "Executor",
        "One backend on one thread, with a limit to how long a step may take.",
        Option("step_timeout_s", "float", "60.0", "gt(0.0)", "A step that takes longer fails.", "s"),
    ),
    "observer": Start(
        "Observer",
        "Warns of requests that waited too long for their first token.",
        Option("threshold_s", "float", "1.0", "gt(0.0)", "A longer wait for the first token is too long.", "s"),
    ),
    STAGE: Start(
        "Stage",
        "Limits how many sequences of a tenant run at once.",
        Option("max_running", "int", "0", "ge(0)", "Most sequences of a tenant that run at once; 0: no limit."),
        example="8",
    ),
}
"""What a plugin of each noun starts with, and a stage."""
