"""A simulated engine that serves one request a step is a queue with a known answer."""

from __future__ import annotations

import math
import random

import pytest

from support.simulation import asked, run
from trencadis.errors import InternalError
from trencadis_tools.simulation.fleet import Fleet

SERVICE_S = 0.05


class OneRequest:
    """Every step takes the same time, whatever is in it."""

    def device_s(self, shape):
        return SERVICE_S

    def host_s(self, shape):
        return 0.0


def arrivals(num_requests, rate, *, seed=1):
    """Poisson arrivals of requests that one step answers."""
    draws, time_s, requests = random.Random(seed), 0.0, []
    for i in range(num_requests):
        time_s += draws.expovariate(rate)
        requests.append(asked(f"r{i}", time_s, prompt=8, output=1, max_tokens=1))
    return requests


def served(requests, *, replicas=1, router="round_robin"):
    tables = {
        "engine": {"max_num_seqs": 1, "max_num_batched_tokens": 8, "async_scheduling": False, "max_wait_s": 1e9},
        "cache": {"prefix_caching": False},
        "scheduling": {"name": "fcfs"},
        "router": {"name": router},
    }
    return run(requests, tables, replicas=replicas, step_times=OneRequest())


def test_every_wait_is_that_of_lindleys_recursion():
    """W(n + 1) = max(0, W(n) + s − (a(n + 1) − a(n))): no error at all, request by request.

    Source: Lindley, "The theory of queues with a single server", 1952.
    """
    requests = arrivals(500, 0.9 / SERVICE_S)
    wait_s, before_s = 0.0, requests[0].arrival_s
    for record in served(requests).records:
        wait_s = max(0.0, wait_s - (record.sent_s - before_s))
        assert record.e2e_s == pytest.approx(wait_s + SERVICE_S, abs=1e-9)
        wait_s, before_s = wait_s + SERVICE_S, record.sent_s


def test_turns_among_replicas_are_queues_with_erlang_arrivals():
    """Each of c replicas gets every c-th arrival and follows Lindley's recursion by itself."""
    requests = arrivals(400, 3 * 0.8 / SERVICE_S)
    result = served(requests, replicas=3)
    for replica in range(3):
        free_s = 0.0
        for record in result.records[replica::3]:
            assert record.replica == replica
            free_s = max(free_s, record.sent_s) + SERVICE_S
            assert record.finished_s == pytest.approx(free_s, abs=1e-9)


def test_the_shortest_queue_with_equal_services_is_one_queue_for_all():
    """Services of one length: who joins the least loaded of c replicas waits as in one M/D/c queue, whose recursion is exact.

    Source: Kiefer and Wolfowitz, "On the theory of queues with many servers", 1955.
    """
    requests = arrivals(300, 2 * 0.5 / SERVICE_S)
    free_s = [0.0, 0.0]
    for record in served(requests, replicas=2, router="least_loaded").records:
        free_s.sort()
        free_s[0] = max(free_s[0], record.sent_s) + SERVICE_S
        assert record.finished_s == pytest.approx(free_s[0], abs=1e-9)


@pytest.mark.nightly
def test_many_replicas_of_memoryless_services_wait_as_erlang_says():
    """M/M/c by answers of geometric length, one token a step of s seconds: the wait of M/M/c within 10 % at 30,000 requests.

    The mean service is 40 steps, so that a geometric number of steps is near to an exponential time.

    Source: Erlang C.
    """
    draws, time_s, requests, mean_steps, load, num_servers = random.Random(5), 0.0, [], 40, 0.7, 3
    service_s = mean_steps * SERVICE_S
    for i in range(30_000):
        time_s += draws.expovariate(num_servers * load / service_s)
        steps = 1 + int(math.log(1 - draws.random()) / math.log(1 - 1 / mean_steps))
        requests.append(asked(f"r{i}", time_s, prompt=8, output=steps))
    tables = {
        "engine": {"max_num_seqs": num_servers, "async_scheduling": False, "max_wait_s": 1e9},
        "cache": {"prefix_caching": False, "num_blocks": 2000},
        "scheduling": {"name": "fcfs"},
    }
    result = run(requests, tables, step_times=OneRequest())
    offered = num_servers * load
    terms = [offered**k / math.factorial(k) for k in range(num_servers)]
    last = offered**num_servers / math.factorial(num_servers) / (1 - load)
    expected_s = last / (sum(terms) + last) * service_s / (num_servers * (1 - load))
    waits = [record.e2e_s - record.num_output_tokens * SERVICE_S for record in result.records]
    assert sum(waits) / len(waits) == pytest.approx(expected_s, rel=0.1, abs=2 * SERVICE_S)


def test_a_run_that_breaks_littles_law_is_an_error(monkeypatch):
    end = Fleet._end

    def forgets(self, live, end_s, **more):
        end(self, live, end_s - 0.01, **more)

    monkeypatch.setattr(Fleet, "_end", forgets)
    with pytest.raises(InternalError, match="Little's law"):
        run([asked("a")])
