"""Check that loads a configured model once, without a KV cache, and reports how it is held and run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trencadis.api import Config, Registry, resolve_model_path, resolve_plan
from trencadis.clock import SystemClock
from trencadis.interfaces import ComponentContext
from trencadis.records import ModelFacts, ModelSource
from trencadis_tools.doctor.findings import Findings

__all__ = ["LARGEST_BYTES", "check_loading"]

LARGEST_BYTES = 4 << 30
"""Size of weights, bytes, above which a model is not loaded for an examination."""


def check_loading(
    found: Findings, config: Config, registry: Registry, sources: Mapping[str, str], facts: ModelFacts | None
) -> None:
    """Load the model, and report the backend's description: format, storage of weights, way of execution, and reasons.

    Args:
        found: Findings to add to.
        config: Configuration; tables ``model``, ``parallel``, ``backend`` and ``sampler`` are read.
        registry: The plugins.
        sources: Source of each value, by dotted path; a model path that is the default is not loaded.
        facts: Facts from the model's files, or None.

    Raises:
        TrencadisError: The model cannot be loaded.
    """
    if sources.get("model.path", "default") == "default":
        return None
    if config.parallel.tensor * config.parallel.pipeline > 1:
        return found.ok(
            f"model {config.model.path}: not loaded here, for ranks divide it; trencadis serve -v says how it runs"
        )
    if facts is not None and facts.weights_bytes > LARGEST_BYTES:
        return found.ok(
            f"model {config.model.path}: not loaded here, for its files have {facts.weights_bytes / 2**30:.0f} GiB; "
            "trencadis generate -v says how it is held and runs"
        )
    backend, sampler = _parts(config, registry)
    try:
        loaded = backend.load(_source(config), sampler=sampler)
    finally:
        backend.close()
    said = loaded.description or "the backend says nothing of its form"
    return found.ok(f"model {config.model.path}: {said}")


def _parts(config: Config, registry: Registry) -> tuple[Any, Any]:
    plan = resolve_plan(config, registry)

    def make(noun: str, name: str) -> Any:
        choice = plan.inner_choice(noun, name) if name else plan.choices[noun]
        return registry.build(choice.component, choice.options, context)

    context = ComponentContext(clock=SystemClock(), seed=config.engine.seed, make=make)
    return make("backend", ""), make("sampling", "")


def _source(config: Config) -> ModelSource:
    model = config.model
    return ModelSource(
        path=str(resolve_model_path(model.path)),
        dtype=model.dtype,
        revision=model.revision,
        trust_remote_code=model.trust_remote_code,
    )
