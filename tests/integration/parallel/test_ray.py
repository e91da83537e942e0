"""Ranks in actors of a Ray cluster of one node."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from support.parallel_requests import PROMPTS, answers
from trencadis import LLM, SamplingParams
from trencadis.errors import BackendError

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]
ray = pytest.importorskip("ray", reason='Ray is not installed: pip install "trencadis[ray]"')


@pytest.fixture(scope="module")
def cluster():
    """A cluster of one node."""
    from ray.cluster_utils import Cluster

    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled")
    try:
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": 80_000_000})
    except Exception as error:
        pytest.skip(f"Ray itself cannot start a cluster on this machine: {error}")
    yield made
    ray.shutdown()
    made.shutdown()


def on(cluster, **more):
    return {"executor.name": "ray", "executor.ray.address": cluster.address, "parallel.tensor": 2, **more}


def test_a_cluster_that_has_no_room_is_an_error_with_what_it_has(cluster):
    with pytest.raises(BackendError, match=r"no room for 2 ranks of \{'CPU': 50.0\} for 1 s"):
        LLM(**on(cluster, **{"executor.ray.num_cpus": 50, "executor.ray.start_timeout_s": 1}))


# On several hosts, of which one is lost: test_ray_hosts.py
def test_answers_on_one_node_are_those_of_one_process_and_an_actor_that_is_killed_costs_none(cluster):
    assert answers(**on(cluster)) == answers()
    params = SamplingParams(max_tokens=150, temperature=0.8, seed=5, ignore_eos=True)
    with LLM(**on(cluster, **{"observer.names": [], "cache.num_blocks": 128})) as llm:
        executor = llm._frontend.engine.engine._executor
        expected = [one.outputs[0].token_ids for one in llm.generate(PROMPTS, params)]
        pid = ray.get(executor._ranks[1]._actor.__ray_call__.remote(lambda self: os.getpid()))
        timer = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
        timer.start()
        found = [one.outputs[0].token_ids for one in llm.generate(PROMPTS, params)]
        timer.join()
        assert found == expected
