from __future__ import annotations

import socket

from trencadis.link import Link
from trencadis_plugins.executor.ranks.link import Kind, receive_messages, send_message


def test_a_message_has_kind_number_and_payload() -> None:
    one, other = map(Link, socket.socketpair())
    messages = [(kind, 2**64 - 1 - kind, bytes(kind)) for kind in Kind]
    for kind, number, payload in messages:
        send_message(one, kind, number, payload)
    assert receive_messages(other) == messages
    one.close()
    other.close()
