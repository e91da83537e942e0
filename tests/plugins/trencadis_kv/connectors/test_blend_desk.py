from __future__ import annotations

import logging

from support.kv.blend_pairs import BlendHands
from trencadis.errors import TransferError
from trencadis.records import TransferCause


def test_failures_are_counted_and_logged(caplog):
    hands = BlendHands()
    with caplog.at_level(logging.WARNING):
        hands.shared.failed(TransferError("gone.", cause=TransferCause.EVICTED), "load")
    assert hands.shared.counters.value("transfer_failures_total", cause="evicted") == 1
    assert "KV load of blend failed (evicted): gone." in caplog.text
    hands.close()


def test_each_thread_gets_a_connection_of_its_own():
    hands = BlendHands()
    assert hands.shared.client() is not hands.shared.client()
    hands.close()
