"""The stages that plugins offer, in the order in which an engine calls them."""

from __future__ import annotations

import graphlib
import logging
from collections.abc import Mapping
from operator import attrgetter

import attrs

from trencadis.config.schema import STAGE_OF_SETTING, Config
from trencadis.errors import ContractError, PluginError
from trencadis.faults import shown
from trencadis.interfaces.stage_definition import StageDefinition
from trencadis.registry.manager import PluginLoader
from trencadis.registry.provenance import Provenance

__all__ = ["RegisteredStage", "in_order", "required_stages", "stages_of"]

logger = logging.getLogger("trencadis.registry")

_HOOK = "trencadis_stages"


@attrs.frozen(kw_only=True)
class RegisteredStage:
    """A stage and where it comes from.

    Attributes:
        definition: The definition that the plugin yielded.
        provenance: Which plugin did.
    """

    definition: StageDefinition
    provenance: Provenance

    def __str__(self) -> str:
        """Return ``stage "token_cap" of token-cap 0.2.0 (plugin "token_cap")``."""
        return f'stage "{self.definition.name}" of {self.provenance}'


def stages_of(loader: PluginLoader, plugin: str) -> dict[str, RegisteredStage]:
    """Return the stages that a plugin offers, by name.

    Raises:
        PluginLoadError: The hook raised.
        ContractError: It yielded something else, or a name twice.
    """
    provenance = loader.plugins[plugin]
    found: dict[str, RegisteredStage] = {}
    for item in loader.offered(plugin, _HOOK):
        if not isinstance(item, StageDefinition):
            raise ContractError(
                f"{provenance} yielded {shown(item)} from {_HOOK}, where a trencadis.interfaces.StageDefinition is expected.",
                hint=provenance.remedy,
            )
        if item.name in found:
            raise ContractError(f'{provenance} yielded the stage "{item.name}" twice.', hint=provenance.remedy)
        found[item.name] = RegisteredStage(definition=item, provenance=provenance)
    return found


def in_order(stages: Mapping[str, RegisteredStage]) -> tuple[RegisteredStage, ...]:
    """Return stages such that each comes before those that it has to act before; among equals by name. Pure.

    Raises:
        ContractError: Some have to act before each other.
    """
    graph: dict[str, set[str]] = {name: set() for name in stages}
    for name, stage in stages.items():
        for later in stage.definition.before & stages.keys():
            graph[later].add(name)
    sorter = graphlib.TopologicalSorter(graph)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        circle = " before ".join(f'"{name}"' for name in reversed(error.args[1]))
        last = stages[error.args[1][0]].provenance
        raise ContractError(f"Stages have to act before each other: {circle}.", hint=last.remedy) from None
    order: list[str] = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready())
        order += ready
        sorter.done(*ready)
    return tuple(stages[name] for name in order)


def required_stages(config: Config, stages: tuple[RegisteredStage, ...]) -> tuple[RegisteredStage, ...]:
    """Return stages if those are among them that the configuration asks for; warn if no step can be recorded.

    Raises:
        PluginError: A built-in one is missing: it would be left out silently.
    """
    names = {one.definition.name for one in stages}
    missing = {
        name
        for setting, (name, idle) in STAGE_OF_SETTING.items()
        if name not in names and attrgetter(setting)(config) not in idle
    }
    is_blocked = any(name.rpartition(":")[2] == "stages" for name in config.plugins.blocked)
    if is_blocked or missing:
        raise PluginError(
            f"the built-in stages are missing{': ' if missing else ''}{', '.join(sorted(missing))}: an engine would leave out what the "
            "configuration asks for.",
            hint='Take the plugin "stages" out of [plugins] blocked, or install trencadis again.',
        )
    if config.flight_recorder.num_steps and "flight_recorder" not in names:
        logger.warning(
            'No step is recorded: the plugin "tools" is not loaded. Load it, or set flight_recorder.num_steps to 0.'
        )
    return stages
