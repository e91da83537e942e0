"""What the engine does beside planning, running and committing steps: a folder for each stage.

They come in through the door that every plugin uses, the hook ``trencadis_stages``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trencadis.hookspecs import hookimpl
from trencadis.interfaces import StageDefinition
from trencadis.records import LayoutFeature

__all__ = ["trencadis_stages"]


def _make_swapping(makings: Any) -> Any:
    from trencadis_stages.swap.swapping import Swapping

    return Swapping(makings)


def _make_defragmenting(makings: Any) -> Any:
    from trencadis_stages.defragmenter.defragmenter import make_defragmenting

    return make_defragmenting(makings)


def _make_partitions(makings: Any) -> Any:
    from trencadis_stages.partitions.partitions import Partitions

    return Partitions(makings)


def _make_pipeline(makings: Any) -> Any:
    from trencadis_stages.pipeline.pipeline import Pipeline

    return Pipeline(makings)


def _make_deferred_warm_up(makings: Any) -> Any:
    from trencadis_stages.deferred_warm_up.deferred_warm_up import make_deferred_warm_up

    return make_deferred_warm_up(makings)


def _make_embedding(_: Any) -> Any:
    from trencadis_stages.embedding.stage import EmbeddingStage

    return EmbeddingStage()


def _make_embedding_engine(parts: Any) -> Any:
    from trencadis_stages.embedding.engine import EmbeddingEngine

    return EmbeddingEngine(parts)


def _make_preparation(makings: Any) -> Any:
    from trencadis_stages.preparation.preparation import Preparation

    return Preparation(makings)


def _make_explaining(makings: Any) -> Any:
    from trencadis_stages.explain.stage import make_explaining

    return make_explaining(makings)


def _make_transfer(makings: Any) -> Any:
    from trencadis_stages.transfer.transfer import make_transfer

    return make_transfer(makings)


def _make_speculation(makings: Any) -> Any:
    if makings.made("speculation") is None:
        return None
    from trencadis_stages.speculation.speculation import Speculation

    return Speculation(makings)


def _make_shadow(makings: Any) -> Any:
    from trencadis_stages.shadow.shadow import make_shadow

    return make_shadow(makings)


def _make_switch(makings: Any) -> Any:
    from trencadis_stages.switch.switch import Switch

    return Switch(makings)


def _make_tenants(makings: Any) -> Any:
    from trencadis_stages.tenants.tenants import Tenants

    return Tenants()


_CONNECTORS = LayoutFeature(
    name="KV connectors",
    setting="kv_connector.name",
    unless=("", "none"),
    unless_provides={"processes": "kv_connector.ranks"},
    refused={
        "processes": 'its worker sides do not run in the processes of ranks (it does not provide "kv_connector.ranks")',
        "attention": "ranks have blocks of other sequences, and all worker sides are told the same",
    },
    remedy='Set kv_connector.name to one that goes with the layout (docs/layouts.md), or to "none"; a single rank can also run with executor.name = "inline".',
)


_STAGES = (
    StageDefinition(
        name="swap",
        make=_make_swapping,
        summary="Keeps the KV of preempted sequences in host memory.",
        when=lambda config: config.engine.preemption == "swap",
        layouts=(
            LayoutFeature(
                name="Preempted sequences in host memory", setting="engine.preemption", unless=("recompute",)
            ),
        ),
        before=frozenset({"defragmenter", "transfer"}),
    ),
    StageDefinition(
        name="defragmenter",
        make=_make_defragmenting,
        summary="Moves KV blocks to low ids, for backends that read them by range.",
        when=lambda config: config.defragmenter.enabled != "off",
        layouts=(LayoutFeature(name="Defragmentation", setting="defragmenter.enabled", unless=("auto", "off")),),
        before=frozenset({"transfer"}),
    ),
    StageDefinition(
        name="transfer",
        make=_make_transfer,
        summary="Looks up, loads and saves KV by the KV connector.",
        uses=frozenset({"kv_connector"}),
        layouts=(_CONNECTORS,),
        before=frozenset({"embedding", "tenants"}),
    ),
    StageDefinition(
        name="tenants",
        make=_make_tenants,
        summary="Gives tenants their shares, and keeps their caps.",
        layouts=(LayoutFeature(name="Tenants"),),
    ),
    StageDefinition(
        name="partitions",
        make=_make_partitions,
        summary="Divides rows and KV blocks over ranks that have sequences of their own.",
        when=lambda config: config.parallel.attention == "data" and config.parallel.tensor > 1,
        before=frozenset({"speculation"}),
    ),
    StageDefinition(
        name="speculation",
        make=_make_speculation,
        summary="Has drafts made, and tells what became of them.",
        uses=frozenset({"speculation", "draft_length", "acceptance"}),
        layouts=(
            LayoutFeature(
                name="Speculation: any drafter, in lines and trees", setting="speculation.name", unless=("", "none")
            ),
            LayoutFeature(
                name="Acceptance rules, with distributions of drafts too", setting="acceptance.name", unless=("match",)
            ),
        ),
        before=frozenset({"pipeline"}),
    ),
    StageDefinition(
        name="pipeline",
        make=_make_pipeline,
        summary="Keeps a batch in flight for each stage of a pipeline of ranks.",
        when=lambda config: config.parallel.pipeline > 1,
    ),
    StageDefinition(
        name="deferred_warm_up",
        make=_make_deferred_warm_up,
        summary="Prepares buckets that the warm-up put off while there is nothing to serve.",
        when=lambda config: config.engine.warmup,
    ),
    StageDefinition(
        name="embedding",
        make=_make_embedding,
        make_engine=_make_embedding_engine,
        summary="Embeds texts beside the steps of requests that generate.",
        layouts=(LayoutFeature(name="Embeddings of a decoder"),),
    ),
    StageDefinition(
        name="shadow",
        make=_make_shadow,
        summary="Asks a scheduling policy beside the one that decides.",
        when=lambda config: bool(config.scheduling.shadow),
    ),
    StageDefinition(
        name="switch",
        make=_make_switch,
        summary="Replaces the scheduling policy while the engine serves.",
    ),
    StageDefinition(
        name="preparation",
        make=_make_preparation,
        summary="Lets a request wait for its sampler, such as for a grammar.",
        before=frozenset({"embedding"}),
    ),
    StageDefinition(
        name="explain",
        make=_make_explaining,
        summary="Records why the last steps were planned as they were.",
    ),
)


@hookimpl
def trencadis_stages() -> Iterable[StageDefinition]:
    """Return the built-in stages."""
    return _STAGES
