"""A cluster of engines on this machine, for trying out and for tests: prefill engines, and engines that serve clients.

plan_cluster ─▶ Members ─▶ run_cluster: start, watch, forward, end
"""

from __future__ import annotations

from trencadis_kv.cluster.plan import Member, plan_cluster
from trencadis_kv.cluster.running import Cluster

__all__ = ["Cluster", "Member", "plan_cluster"]
