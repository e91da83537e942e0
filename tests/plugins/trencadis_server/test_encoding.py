from __future__ import annotations

import asyncio
import threading

from trencadis_server.generation.encoding import Encoder


def test_a_short_text_is_encoded_at_once_and_a_long_one_on_a_thread() -> None:
    async def main() -> tuple[int, int]:
        encoder = Encoder()
        short = await encoder.run(threading.get_ident, num_characters=10)
        return short, await encoder.run(threading.get_ident, num_characters=10**6)

    short, long = asyncio.run(main())
    assert short == threading.get_ident()
    assert long != threading.get_ident()


def test_long_texts_wait_for_a_free_thread() -> None:
    running: list[int] = []
    most: list[int] = []
    pair = threading.Barrier(2)
    lock = threading.Lock()

    def work() -> None:
        with lock:
            running.append(1)
            most.append(len(running))
        pair.wait(timeout=10)  # so that two do overlap
        with lock:
            running.pop()

    async def main() -> None:
        encoder = Encoder(max_threads=2)
        await asyncio.gather(*(encoder.run(work, num_characters=10**6) for _ in range(6)))

    asyncio.run(main())
    assert max(most) == 2
