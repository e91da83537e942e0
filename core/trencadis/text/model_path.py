"""Where a model is: in this package, in a directory, in a ``.gguf`` file, or on the hub; and whether it can be had from there."""

from __future__ import annotations

import importlib
import importlib.resources
import re
from pathlib import Path
from typing import Any

from trencadis.errors import ModelLoadError

__all__ = ["check_model_path", "is_hub_id", "resolve_model_path"]

_BUILT_IN = {
    "demo": "target",
    "demo-draft": "draft",
    "demo-distilled": "distilled",
    "demo-parallel": "parallel",
    "demo-head": "head",
}
"""Names of the models in this package, and their directories under ``demo/``."""

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
"""Source: ``huggingface_hub.utils.validate_repo_id``."""

_HUB_TIMEOUT_S = 10.0

_FORMS = 'Give a directory with config.json, a .gguf file, "demo", or a hub id such as Qwen/Qwen3-0.6B.'


def resolve_model_path(path: str) -> str:
    """Return where a model is. Pure.

    ``"demo"``, its draft models ``"demo-draft"``, ``"demo-distilled"`` and ``"demo-parallel"`` and its head ``"demo-head"`` are directories in
    this package; anything else is returned as it is.
    """
    if path not in _BUILT_IN:
        return path
    return str(Path(str(importlib.resources.files("trencadis"))) / "demo" / _BUILT_IN[path])


def is_hub_id(path: str) -> bool:
    """Return whether a text can be the id of a model on the hub, ``owner/name`` or ``name``. Pure."""
    return _HUB_ID.fullmatch(path) is not None and not path.endswith(".gguf")


def check_model_path(path: str, *, where: str, revision: str = "", asks_hub: bool = True) -> None:
    """Refuse a path that leads nowhere, and a hub id that can be had neither from this machine nor from the hub.

    Asks the hub, once, only for what is not on this machine.

    Args:
        path: A directory, a ``.gguf`` file, a hub id, or a built-in name.
        where: The setting that holds it, with value and source, for messages.
        revision: Commit or tag of a hub id; empty for the newest.
        asks_hub: Look a hub id up; False: any is accepted.

    Raises:
        ModelLoadError: With the path, who set it, and what to do.
    """
    if Path(resolve_model_path(path)).exists():
        return
    if not is_hub_id(path):
        raise ModelLoadError(f"{where}: there is no such file or directory.", hint=_FORMS)
    if not asks_hub:
        return
    hub: Any = importlib.import_module("huggingface_hub")
    if isinstance(hub.try_to_load_from_cache(path, "config.json", revision=revision or None), str):
        return
    try:
        hub.HfApi().model_info(path, revision=revision or None, timeout=_HUB_TIMEOUT_S)
    except Exception as error:
        _raise_refused(error, path, where, revision)


def _raise_refused(error: Exception, path: str, where: str, revision: str) -> None:
    """Raise what a failed question to the hub means, in words; other refusals are left to the download, which may go another way."""
    errors: Any = importlib.import_module("huggingface_hub.errors")
    constants: Any = importlib.import_module("huggingface_hub.constants")
    nowhere = f"{where}: there is no such directory or file, and the hub"
    if isinstance(error, errors.OfflineModeIsEnabled):
        raise ModelLoadError(
            f"{nowhere} may not be asked: HF_HUB_OFFLINE is set, and no model of that id is in the cache.",
            hint=f"Unset it, or correct the path. {_FORMS}",
        ) from error
    if isinstance(error, errors.GatedRepoError):
        raise ModelLoadError(
            f"{where}: the model is gated.", hint="Accept its terms on its page, then log in: hf auth login."
        ) from error
    if isinstance(error, errors.RevisionNotFoundError):
        raise ModelLoadError(
            f'{where}: the hub has no revision "{revision}" of it.', hint="Correct model.revision."
        ) from error
    if isinstance(error, errors.RepositoryNotFoundError):
        raise ModelLoadError(
            f"{nowhere} has no model of that name that you may read.",
            hint=f"{_FORMS} If it is private, log in: hf auth login.",
        ) from error
    if isinstance(error, errors.HfHubHTTPError):
        return
    raise ModelLoadError(
        f"{nowhere} cannot be reached from here: {constants.ENDPOINT}: {str(error) or type(error).__name__}.",
        hint=f"If it is a hub id, connect this machine to the network, or run hf download {path} on one that is and copy the directory here. "
        "If it is a path, correct it.",
    ) from error
