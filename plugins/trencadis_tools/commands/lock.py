"""``trencadis lock``: write everything that determines an engine's results to a file that ``--locked`` verifies at later starts."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from trencadis.api import Config, Registry
from trencadis.errors import ConfigError
from trencadis_tools.lock import differences, lock_of, read_lock

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags."""
    parser.epilog = (
        "Locked are plugins with their versions and source files, versions of Python, torch and transformers, active components, "
        "tables of the core but [log] and [plugins], options of the components, and the files of the model; weights by their size."
    )
    parser.add_argument(
        "--out", type=Path, default=Path("trencadis.lock"), metavar="FILE", help="default: trencadis.lock"
    )
    parser.add_argument("--check", action="store_true", help="write nothing; list what differs from the file")


def run(args: argparse.Namespace, config: Config, registry: Registry) -> int:
    """Write the lock, or print the differences to it; returns 0, or 1 if something differs.

    Raises:
        ConfigError: The model's path does not exist, or the file cannot be written or (``--check``) read.
        PluginError: The configuration names a component that does not exist or does not fit the others.
    """
    lock = lock_of(config, registry)
    if lock.model.get("hub", "").startswith(("/", ".", "~")):
        raise ConfigError(
            f'[model] path = "{config.model.path}": there is no file of a model, so that nothing of it can be locked.',
            hint="Write the lock where the model lies, or give a hub id such as Qwen/Qwen3-0.6B.",
        )
    if args.check:
        found = differences(read_lock(args.out), lock, registry.sources)
        print("\n".join(found) if found else f"{args.out}: nothing has changed")
        return 1 if found else 0
    try:
        args.out.write_text(lock.as_json(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--out {args.out}: {error.strerror or error}.", hint="Name a file that can be written."
        ) from error
    print(
        f"{args.out}: {len(lock.plugins)} plugins, {len(lock.files)} files, {len(lock.settings)} settings, plan {lock.plan_hash}"
    )
    if lock.model.get("hub") and len(lock.model["revision"]) != 40:
        print(
            "warning: the hub id of the model is locked, not what it stands for: set model.revision to a commit.",
            file=sys.stderr,
        )
    return 0
