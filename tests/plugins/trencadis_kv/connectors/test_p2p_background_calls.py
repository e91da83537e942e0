from __future__ import annotations

import threading

from support.eventually import eventually
from support.kv.p2p_ends import producing
from trencadis.clock import SimulatedClock
from trencadis_kv.connectors.p2p.params import RemotePrefix
from trencadis_kv.connectors.p2p.peers import BackgroundCalls, Peers


def background_calls() -> tuple[BackgroundCalls, Peers]:
    peers = Peers(("127.0.0.0/8:*",), SimulatedClock(), retry_s=5)
    return BackgroundCalls(peers, connect_timeout_s=2.0), peers


def test_release_and_renewal_reach_the_producer() -> None:
    calls, _ = background_calls()
    with producing() as producer:
        calls.identity = producer.me
        producer.clock.advance(20)
        calls.renew(producer.prefix)
        eventually(lambda: producer.node.holds._by_name["held"].expires_s > 31)
        calls.release(producer.prefix)
        eventually(lambda: producer.node.holds.ends == {"released": 1})
    calls.close()
    calls.close()


def test_first_background_calls_many_threads_start_one_thread_and_closing_meanwhile_is_fine() -> None:
    prefix = RemotePrefix(engine="x", hold_id="t", host="127.0.0.1", port=9, num_tokens=1, lease_s=1.0)
    for _ in range(50):
        calls, _ = background_calls()
        together = threading.Barrier(4)

        def give_back(calls: BackgroundCalls = calls, together: threading.Barrier = together) -> None:
            together.wait(60)
            calls.release(prefix)

        threads = [threading.Thread(target=give_back) for _ in range(3)]
        for thread in threads:
            thread.start()
        together.wait(60)
        calls.close()
        for thread in threads:
            thread.join(60)
    assert not [one for one in threading.enumerate() if one.name == "trencadis-p2p-calls"]


def test_dead_producer_is_noted_and_not_tried_again() -> None:
    calls, peers = background_calls()
    with producing() as producer:
        calls.identity = producer.me
    calls.release(producer.prefix)
    eventually(lambda: peers.is_down(producer.prefix))
    calls.release(producer.prefix)
    calls.close()


def test_close_lets_what_waits_be_done() -> None:
    calls, _ = background_calls()
    with producing() as producer:
        calls.identity = producer.me
        calls.release(producer.prefix)
        calls.close()
        assert producer.node.holds.ends == {"released": 1}


def test_nothing_runs_before_there_is_an_errand_and_too_many_are_dropped() -> None:
    calls, _ = background_calls()
    assert calls._thread is None
    calls.close()
    with producing() as producer:
        calls._thread = threading.current_thread()  # nobody works
        for _ in range(3000):
            calls.release(producer.prefix)
    assert calls._todo.qsize() == 1024
