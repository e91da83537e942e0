"""``trencadis kv``: list, verify, export and import a directory of KV blocks."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trencadis_kv.exchange.file_layout import Moved
    from trencadis_kv.store.inventory import NamespaceSummary
    from trencadis_kv.store.object_directory import ObjectDirectory

__all__ = ["TAKES_CONFIG", "add_arguments", "run_alone"]

TAKES_CONFIG = False
"""The command reads a directory without an engine, so it also works where no engine can be started."""

_MOST_NAMED = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags."""
    parser.epilog = (
        "Engines may go on using the directory. What is exported holds KV of prompts: treat it like the prompts."
    )
    parser.add_argument("action", choices=["show", "verify", "export", "import"], help="what to do")
    parser.add_argument("path", type=Path, metavar="DIR", help="the directory: [kv_connector.filesystem] path")
    parser.add_argument("file", type=Path, nargs="?", metavar="FILE", help="export, import: the safetensors file")
    parser.add_argument(
        "--namespace", default="", metavar="NAME", help="export: only its blocks; import: put all blocks there"
    )
    parser.add_argument("--repair", action="store_true", help="verify: delete what is broken")
    parser.add_argument("--trust-others", action="store_true", help="also blocks of other users")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_alone(args: argparse.Namespace, flags: Sequence[str]) -> int:
    """Run the subcommand; returns 0, or 1 if ``verify`` found broken objects and did not delete them.

    Raises:
        ConfigError: Flags contradict each other, there is no such directory, or a file cannot be read or written.
        TransferError: The directory cannot be used.
    """
    from trencadis_kv.store.object_directory import ObjectDirectory

    _check(args)
    directory = ObjectDirectory(args.path.absolute(), trust_others=args.trust_others)
    directory.check()
    action = {"show": _show, "verify": _verify, "export": _export, "import": _import}[args.action]
    return action(directory, args)


def _check(args: argparse.Namespace) -> None:
    from trencadis.errors import ConfigError
    from trencadis_kv.store.identity import is_namespace

    moves = args.action in {"export", "import"}
    if moves != (args.file is not None):
        wrong = "needs a FILE" if moves else f"takes no FILE, got {args.file}"
        raise ConfigError(f"trencadis kv {args.action} {wrong}.", hint="See trencadis kv --help.")
    if args.repair and args.action != "verify":
        raise ConfigError(f"trencadis kv {args.action}: --repair goes with verify.", hint="Leave it out.")
    if args.namespace and (not moves or not is_namespace(args.namespace)):
        hint = "It goes with export and import: 1 to 64 of A-Za-z0-9._- with no dot in front."
        raise ConfigError(f"trencadis kv {args.action}: --namespace {args.namespace!r}.", hint=hint)
    if args.action != "import" and not args.path.is_dir():
        raise ConfigError(f"{args.path}: no such directory.", hint="Give [kv_connector.filesystem] path.")


def _show(directory: ObjectDirectory, args: argparse.Namespace) -> int:
    import attrs

    from trencadis.console import print_table
    from trencadis_kv.store.inventory import take_stock

    summaries = take_stock(directory)
    if args.json:
        print(json.dumps([attrs.asdict(summary) for summary in summaries]))
        return 0
    print_table(("namespace", "compatibility", "shard", "model", "blocks", "MiB", "used"), [_row(s) for s in summaries])
    num_bytes = sum(summary.num_bytes for summary in summaries)
    print(f"{sum(summary.num_objects for summary in summaries)} blocks, {_mib(num_bytes)} MiB")
    return 0


def _row(summary: NamespaceSummary) -> list[str]:
    from datetime import UTC, datetime

    used = datetime.fromtimestamp(summary.used_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%MZ")
    model = summary.model or "not described"
    size = _mib(summary.num_bytes)
    return [summary.namespace, summary.compat[:12], summary.shard, model, str(summary.num_objects), size, used]


def _verify(directory: ObjectDirectory, args: argparse.Namespace) -> int:
    from trencadis.console import track
    from trencadis.records import TransferCause
    from trencadis_kv.store.inventory import BlockKey, examine

    counts = {"num_whole": 0, "num_descriptions": 0, "num_foreign": 0, "num_broken": 0, "num_deleted": 0}
    broken: list[dict[str, str]] = []
    with track(f"Reading {directory.root}", unit="objects") as advance:
        for number, finding in enumerate(examine(directory), 1):
            advance(number)
            if not finding.cause:
                counts["num_descriptions" if BlockKey.parse(finding.key) is None else "num_whole"] += 1
            elif finding.cause == TransferCause.INCOMPATIBLE:
                counts["num_foreign"] += 1
            elif finding.cause == TransferCause.CORRUPT:
                counts["num_broken"] += 1
                broken.append({"key": finding.key, "why": finding.message})
                if args.repair:
                    directory.remove(finding.key)
                    counts["num_deleted"] += 1
    if args.json:
        print(json.dumps({**counts, "broken": broken}))
    else:
        _print_verdict(counts, broken)
    return 1 if counts["num_broken"] > counts["num_deleted"] else 0


def _print_verdict(counts: dict[str, int], broken: list[dict[str, str]]) -> None:
    for one in broken[:_MOST_NAMED]:
        print(f"{one['key']}: {one['why']}")
    if len(broken) > _MOST_NAMED:
        print(f"… and {len(broken) - _MOST_NAMED} more; --json lists all")
    print(
        f"{counts['num_whole']} blocks whole, {counts['num_broken']} broken, {counts['num_deleted']} of them deleted, "
        f"{counts['num_foreign']} of another format version; beside blocks, {counts['num_descriptions']} descriptions of them whole"
    )


def _export(directory: ObjectDirectory, args: argparse.Namespace) -> int:
    from trencadis.console import track
    from trencadis_kv.exchange.export_objects import export_objects

    with track(f"Writing {args.file}", unit="blocks") as advance:
        moved = export_objects(directory, args.file, namespace=args.namespace, progress=advance)
    return _print_moved(moved, args, "exported")


def _import(directory: ObjectDirectory, args: argparse.Namespace) -> int:
    from trencadis.console import track
    from trencadis_kv.exchange.import_objects import import_objects

    with track(f"Reading {args.file}", unit="blocks") as advance:
        moved = import_objects(args.file, directory, namespace=args.namespace, progress=advance)
    return _print_moved(moved, args, "imported")


def _print_moved(moved: Moved, args: argparse.Namespace, done: str) -> int:
    import attrs

    facts: dict[str, Any] = attrs.asdict(moved)
    if args.json:
        print(json.dumps(facts))
        return 0
    left_out = f", {moved.num_broken} broken ones left out" if moved.num_broken else ""
    print(f"{moved.num_objects} blocks {done}, {_mib(moved.num_bytes)} MiB{left_out}")
    return 0


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f}"
