"""Plugins: discovery, the components they offer, and the plan of which component serves each noun."""

from __future__ import annotations

from trencadis.registry.collect import RegisteredComponent
from trencadis.registry.contracts import CONTRACTS
from trencadis.registry.plan import Choice, ResolvedPlan, resolve_plan
from trencadis.registry.provenance import Provenance
from trencadis.registry.registry import Registry
from trencadis.registry.startup import load_with_plugins

__all__ = [
    "CONTRACTS",
    "Choice",
    "Provenance",
    "RegisteredComponent",
    "Registry",
    "ResolvedPlan",
    "load_with_plugins",
    "resolve_plan",
]
