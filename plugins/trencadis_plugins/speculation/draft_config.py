"""Config tables of the speculators that draft with a model; no torch here, the command line reads them."""

from __future__ import annotations

import attrs
from attrs.validators import and_, deep_iterable, ge, in_, lt, min_len

from trencadis.interfaces import setting

__all__ = ["TREES", "DraftModelConfig", "DraftWithModelConfig", "ParallelDraftConfig", "TreeConfig"]

TREES = ("none", "top_k", "static", "sequoia")
"""How drafts branch."""


@attrs.frozen(kw_only=True)
class DraftWithModelConfig:
    """Common settings of speculators with a draft model.

    Attributes:
        model: The draft model: a directory, a ``.gguf`` file, a hub id or a built-in name.
        backend: Component that runs it, with the options of its own table; empty: the engine's.
        max_draft_tokens: Most drafts of a sequence in a step.
        sampling: ``greedy``: the most likely tokens, which are certain. ``probabilistic``: drawn with the request's temperature
            and truncations; for acceptance rules that weigh a draft by its probability.
        tokenizer: ``auto``: tokens are translated where the two tokenizers differ. ``same``: they are not compared.
        precision: ``auto``: a backend may hold its weights in fewer bits than its files have, where that is quicker: what it says is
            checked. ``exact``: as those of any model.
        warmup: Prepare the draft backend's buckets before the first request.
    """

    model: str = setting("demo-distilled", "Draft model: a directory, a .gguf file, a hub id or a built-in name.")
    backend: str = setting(
        "", "Backend that runs it, with the options of its own table; empty: the engine's.", component="backend"
    )
    max_draft_tokens: int = setting(4, "Most drafts of a sequence in a step.", unit="tokens", validator=ge(1))
    sampling: str = setting(
        "greedy",
        "greedy: the most likely tokens; probabilistic: drawn as the request asks.",
        validator=in_(["greedy", "probabilistic"]),
    )
    tokenizer: str = setting(
        "auto",
        "auto: translate tokens where the two tokenizers differ; same: do not compare them.",
        validator=in_(["auto", "same"]),
    )
    precision: str = setting(
        "auto",
        "auto: its weights may be held in fewer bits than its files have, for what it says is checked; exact: as any model's.",
        validator=in_(["auto", "exact"]),
    )
    warmup: bool = setting(True, "Prepare the draft backend's buckets before the first request.")


@attrs.frozen(kw_only=True, slots=False)
class TreeConfig:
    """Settings of speculators whose drafts may branch.

    Attributes:
        tree: ``none``: drafts follow each other. ``top_k``: the branches that the drafter believes in. ``static``: one shape.
            ``sequoia``: the shape that is best for the acceptance measured so far.
        tree_width: Most drafts after one token, and most tokens expanded at one depth by ``top_k``.
        tree_depth: Most drafts after one another.
        tree_shape: Shape of the tree ``static``: drafts after each token, depth by depth.
    """

    tree: str = setting(
        "none",
        "none: drafts follow each other; top_k, static, sequoia: they branch, max_draft_tokens of them in all.",
        validator=in_(TREES),
    )
    tree_width: int = setting(
        3, "Most drafts after one token; of top_k, also tokens expanded at one depth.", unit="tokens", validator=ge(1)
    )
    tree_depth: int = setting(4, "Most drafts one after another.", unit="tokens", validator=ge(1))
    tree_shape: tuple[int, ...] = setting(
        (2, 1),
        "Of static: drafts after each token, depth by depth.",
        unit="tokens",
        validator=[min_len(1), deep_iterable(ge(1))],
    )


@attrs.frozen(kw_only=True)
class DraftModelConfig(TreeConfig, DraftWithModelConfig):
    """Table ``[speculation.draft_model]``.

    Attributes:
        max_draft_tokens: Most drafts of a sequence in a step.
        min_probability: Greedy drafts in a line end before the first that the draft model gives less: it would cost more than it
            brings. 0: they do not.
    """

    max_draft_tokens: int = setting(12, "Most drafts of a sequence in a step.", unit="tokens", validator=ge(1))
    min_probability: float = setting(
        0.25,
        "Greedy drafts in a line end before the first that is less probable, by the draft model; 0: they do not.",
        validator=and_(ge(0.0), lt(1.0)),
    )


@attrs.frozen(kw_only=True)
class ParallelDraftConfig(DraftWithModelConfig):
    """Table ``[speculation.parallel_draft]``.

    Attributes:
        mask_token_id: Token that stands for one that is to be guessed; -1: ``mask_token_id`` of the model's ``config.json``.
    """

    model: str = setting("demo-parallel", "Draft model: a directory, a .gguf file, a hub id or a built-in name.")
    mask_token_id: int = setting(
        -1,
        "Token that stands for one to be guessed; -1: mask_token_id of the model's config.json.",
        validator=ge(-1),
    )
