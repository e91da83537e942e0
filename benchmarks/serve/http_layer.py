"""What the HTTP layer itself costs per output token at 1, 32 and 256 streams: CPU time of the server's process with HTTP and without.

The engine is in its own process and is not counted. Without HTTP, coroutines in the server's process read ``AsyncLLM.generate``;
with it, a third process reads as many streams over loopback. Rounds are interleaved; the A/A floor is the median absolute
difference of the rounds without HTTP from their median.

    python benchmarks/serve/http_layer.py --rounds 7 > benchmarks/results/http_layer.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time

from trencadis import AsyncLLM, SamplingParams
from trencadis.client.factory import configure
from trencadis_server.app import make_app
from trencadis_server.config import server_of, with_server
from trencadis_server.lifecycle.lifecycle import Service, event_loop_factory
from trencadis_server.lifecycle.opening import collect_rarely, listen, make_context
from trencadis_server.lifecycle.supervisor import Supervisor
from trencadis_server.middleware.drain_guard import DrainGuard

PROMPT = "The old man looked at the sea and the boat was far away from him when he"


async def read_streams(port: int, num_streams: int, num_tokens: int) -> int:
    """Read streams to their ends, as a client; returns how many events came."""
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\nconnection: close\r\n\r\n"

    async def one() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + content)
        answer = await reader.read()
        writer.close()
        if not answer.startswith(b"HTTP/1.1 200 ") or b"data: [DONE]" not in answer:
            raise SystemExit(answer[:500].decode())
        return answer.count(b"data: {")

    return sum(await asyncio.gather(*(one() for _ in range(num_streams))))


def be_client() -> None:
    """Read streams whenever a line asks for it, and say how many events came."""
    for line in sys.stdin:
        print(asyncio.run(read_streams(*map(int, line.split()))), flush=True)


async def without_http(llm: AsyncLLM, num_streams: int, num_tokens: int) -> None:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)

    async def one() -> None:
        async for _ in llm.generate(PROMPT, params):
            pass

    await asyncio.gather(*(one() for _ in range(num_streams)))


async def measure(args: argparse.Namespace) -> dict[str, object]:
    tables = {
        "engine": {"placement": "process", "max_num_seqs": max(args.streams)},
        "observer": {"names": []},
    }
    config, registry = configure(args.model, config_file=None, tables=tables)
    supervisor = Supervisor(
        lambda: AsyncLLM.from_config(config, registry), max_restarts=0, on_open=lambda _: collect_rarely()
    )
    config = with_server(config, model_name="demo")
    gate, listener = DrainGuard(), listen("127.0.0.1", 0)
    app = make_app(make_context(config, supervisor), gate=gate)
    service = Service(app, listener, supervisor=supervisor, gate=gate, config=server_of(config))
    running = asyncio.create_task(service.run())
    await supervisor.is_serving.wait()
    client = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--client", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    port = listener.getsockname()[1]
    load = os.getloadavg()[0]
    rows = [await compare(args, supervisor.llm, client, port, num_streams) for num_streams in args.streams]
    client.stdin.close()
    await client.wait()
    service.stop()
    await running
    return {"load_average": round(load, 1), "tokens": args.tokens, "rows": rows}


async def compare(
    args: argparse.Namespace, llm: AsyncLLM, client: asyncio.subprocess.Process, port: int, num_streams: int
) -> dict[str, object]:
    """Return microseconds a token with HTTP and without, in interleaved rounds."""
    num_events = []

    async def with_http() -> None:
        client.stdin.write(f"{port} {num_streams} {args.tokens}\n".encode())
        num_events.append(int(await client.stdout.readline()))

    spent: dict[str, list[float]] = {"with": [], "without": []}
    num_tokens = num_streams * args.tokens
    for number in range(args.rounds + 1):
        for name in ("with", "without") if number % 2 else ("without", "with"):
            start_s = time.process_time()
            await (with_http() if name == "with" else without_http(llm, num_streams, args.tokens))
            if number:  # the first round warms up
                spent[name].append((time.process_time() - start_s) / num_tokens * 1e6)
    without = statistics.median(spent["without"])
    return {
        "streams": num_streams,
        "events_per_token": round(statistics.median(num_events) / num_tokens, 3),
        "with_http_us_per_token": round(statistics.median(spent["with"]), 2),
        "without_http_us_per_token": round(without, 2),
        "http_us_per_token": round(statistics.median(spent["with"]) - without, 2),
        "floor_us_per_token": round(statistics.median(abs(one - without) for one in spent["without"]), 2),
        "rounds": {name: [round(one, 2) for one in values] for name, values in spent.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    if args.client:
        be_client()
        return
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        print(json.dumps(runner.run(measure(args)), indent=2))


if __name__ == "__main__":
    main()
