"""Check that the model can be divided over the ranks of ``[parallel]``."""

from __future__ import annotations

from trencadis.api import Config, Registry, resolve_plan
from trencadis_tools.doctor.findings import Findings
from trencadis_tools.layout.layouts import expert_obstacle, pipeline_obstacle, tensor_obstacle
from trencadis_tools.layout.model import read_configured_model

__all__ = ["check_division"]


def check_division(found: Findings, config: Config, registry: Registry) -> None:
    """Compare ``[parallel]`` with heads, layers and experts of the model, without loading it.

    Args:
        found: Findings to add to.
        config: Configuration; tables ``parallel``, ``model`` and ``backend`` are read.
        registry: The plugins.

    Raises:
        PluginError: A component does not exist.
        ConfigError: The tensor plan's file cannot be read.
        ModelLoadError: The model cannot be read.
    """
    asked = config.parallel
    if asked.tensor * asked.pipeline * asked.expert == 1:
        return
    plan = read_configured_model(config, resolve_plan(config, registry))
    obstacles = {
        "tensor": tensor_obstacle(plan, asked.tensor, expert=asked.expert),
        "pipeline": pipeline_obstacle(plan, asked.pipeline),
        "expert": expert_obstacle(plan, asked.expert),
    }
    for key, obstacle in obstacles.items():
        if obstacle:
            found.fail(
                f"[parallel] {key} = {getattr(asked, key)}: {obstacle}",
                f"Set parallel.{key} to another number; trencadis layout lists what is possible.",
            )
    if not any(obstacles.values()):
        found.ok(
            f"{plan.architecture} can be divided: tensor {asked.tensor}, pipeline {asked.pipeline}, expert {asked.expert}"
        )
