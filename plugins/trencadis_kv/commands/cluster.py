"""``trencadis cluster``: engines that compute prompts and engines that generate, as processes on this machine."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

__all__ = ["add_arguments", "run_alone"]

_DOWN_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags."""
    parser.epilog = (
        "up runs until Ctrl-C, SIGTERM or down. Config flags, such as --cache.num-blocks, go to every engine. An engine that computes "
        "prompts is started again when it dies; requests do not notice."
    )
    parser.add_argument("action", choices=["up", "down"], help="run a cluster, or end the one at --port")
    parser.add_argument("--prefill", type=_number(0), default=1, metavar="N", help="engines that compute prompts (1)")
    parser.add_argument("--decode", type=_number(1), default=1, metavar="N", help="engines that serve clients (1)")
    parser.add_argument("--model", default="", metavar="PATH", help="short for --model.path")
    parser.add_argument(
        "--port", type=_number(1, 65535), default=8000, metavar="PORT", help="where clients come (8000)"
    )


def run_alone(args: argparse.Namespace, flags: Sequence[str]) -> int:
    """Run a cluster or end one; returns 0, or 1 if it ended by itself.

    Raises:
        ConfigError: The port is in use, a flag is the cluster's own, or there is no cluster to end.
    """
    from trencadis_kv.cluster.lock import end_cluster, running_at

    if args.action == "down":
        end_cluster(args.port, timeout_s=_DOWN_S)
        print(f"The cluster at port {args.port} has ended.")
        return 0
    with running_at(args.port):
        return _up(args, flags)


def _up(args: argparse.Namespace, flags: Sequence[str]) -> int:
    import asyncio
    import signal

    from trencadis_kv.cluster import Cluster, plan_cluster

    given = [*flags]
    given += [f"--model.path={args.model}"] if args.model else []
    given += ["--config", str(args.config)] if args.config else []
    members = plan_cluster(num_prefill=args.prefill, num_decode=args.decode, port=args.port, flags=given)

    def announce(line: str) -> None:
        print(line, flush=True)

    async def main() -> int:
        cluster = Cluster(members, port=args.port, announce=announce)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, cluster.stop)
        return await cluster.run()

    return asyncio.run(main())


def _number(least: int, most: int = 64) -> Callable[[str], int]:
    def whole(text: str) -> int:
        if not text.isascii() or not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} to {most}")
        return int(text)

    return whole
