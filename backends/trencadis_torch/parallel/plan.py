"""Plans of tensor parallelism: which module or parameter of a model is divided in which way.

transformers brings a plan with most of its models (``model.tp_plan``); for the others, and for more than it divides, a file has one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from trencadis.errors import ConfigValueError, ModelLoadError
from trencadis.files import read_json, read_toml

__all__ = ["expand_plan", "plan_of", "read_plan_file"]

_OTHER_NAMES: Final = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input"}

_WHOLE: Final = frozenset({"replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params", "replicate"})
"""Styles of what every rank holds and computes whole, where nothing is trained."""

_OF_EXPERTS: Final = ("grouped_gemm", "ep_dispatch_experts")
"""Styles of whole experts, and of the module that has them."""

_STYLES: Final = (
    "colwise",
    "colwise_gather_output",
    "rowwise",
    "rowwise_split_input",
    "packed_colwise",
    "packed_colwise_3",
    "packed_rowwise",
    "embedding_rowwise",
    "moe_tp_experts",
    "grouped_gemm",
    "ep_dispatch_experts",
    "all_reduce",
    "first_rank",
    "replicate",
)


def read_plan_file(path: str, table: str = "backend.torch") -> dict[str, str]:
    """Return the plan of a file.

    Args:
        path: TOML or JSON (by its ending), a table from a module or parameter, ``*`` for any number, to a style; empty: no plan.
        table: Whose key ``tensor_plan`` it is.

    Raises:
        ConfigValueError: It cannot be read, or is no such table.
    """
    if not path:
        return {}
    where = f'[{table}] tensor_plan = "{path}"'
    try:
        file = Path(path).expanduser()
        found: Any = read_json(file) if path.endswith(".json") else read_toml(file)
    except (OSError, RuntimeError, ValueError) as error:  # no such home
        raise ConfigValueError(f"{where}: it cannot be read: {error}.", hint="Give a .toml or .json file.") from error
    if not isinstance(found, dict) or not all(isinstance(style, str) for style in found.values()):
        raise ConfigValueError(
            f"{where}: it is no table from names to styles.",
            hint='Such as: "model.layers.*.self_attn.q_proj" = "colwise". Names with dots need quotes.',
        )
    for name, style in found.items():
        _check_style(style, f"{where}: {name}")
    return found


def _check_style(style: str, where: str) -> None:
    if _OTHER_NAMES.get(style, style) not in _STYLES and style not in _WHOLE:
        raise ConfigValueError(f'{where} = "{style}": no such style.', hint=f"Choose one of: {', '.join(_STYLES)}.")


def plan_of(
    model: Any, configured: dict[str, str], *, whole_experts: bool = False, own_tokens: bool = False
) -> dict[str, str]:
    """Return the plan of a model of transformers, that of the configuration first. Pure.

    Args:
        model: Model as it was built.
        configured: From ``tensor_plan``.
        whole_experts: Each rank has some experts, not a share of each.
        own_tokens: Ranks have different tokens: experts are divided, and the output projection, of which all get the same rows; all
            else is whole.

    Raises:
        ModelLoadError: There is none.
    """
    plan = dict(getattr(model, "tp_plan", None) or {})
    if whole_experts:
        plan = _with_whole_experts(model, plan)
    plan |= configured
    if not plan:
        raise ModelLoadError(
            f"{type(model).__name__} comes without a plan of how its layers are divided, which [parallel] tensor above 1 needs.",
            hint="Write one and name it in the tensor_plan of the backend (docs/do/parallel.md), or set [parallel] tensor = 1.",
        )
    if own_tokens:
        heads = {name for name, module in model.named_modules() if module is model.get_output_embeddings()}
        plan = {
            name: style
            for name, style in plan.items()
            if style in _OF_EXPERTS or (name in heads and style == "colwise_gather_output")
        }
    return plan


def _with_whole_experts(model: Any, plan: dict[str, str]) -> dict[str, str]:
    """Return a plan in which each rank has some experts of the model."""
    found = {name: style for name, style in (getattr(model, "ep_plan", None) or {}).items() if style in _OF_EXPERTS}
    owners = tuple(name for name, style in found.items() if style == "ep_dispatch_experts")
    names = {_with_stars(name) for name, _ in model.named_modules()}
    if names.isdisjoint(owners):
        raise ModelLoadError(
            f"[parallel] expert above 1: {type(model).__name__} has no experts, or no plan of how they are divided as wholes.",
            hint="Set [parallel] expert = 1: each rank then has a share of every layer, and of every expert if there are any.",
        )
    others = {
        name: style for name, style in plan.items() if not f"{name}.".startswith(tuple(f"{one}." for one in owners))
    }
    return {**others, **found}


def _with_stars(name: str) -> str:
    """Return a name with ``*`` for each number. Pure."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def expand_plan(model: Any, plan: dict[str, str]) -> dict[str, str]:
    """Return the style of each module or parameter that a plan names; those that stay whole are left out. Pure.

    Args:
        model: Model whose names are matched.
        plan: ``*`` stands for one number.

    Raises:
        ModelLoadError: A style is not known here.
    """
    found: dict[str, str] = {}
    names = [name for name, _ in model.named_modules()] + [
        name for name, _ in model.named_parameters(remove_duplicate=False)
    ]
    for name in names:
        style = plan.get(name, plan.get(_with_stars(name)))
        if style is None or style in _WHOLE:
            continue
        style = _OTHER_NAMES.get(style, style)
        if style not in _STYLES:
            raise ModelLoadError(
                f'{type(model).__name__}: its plan divides {name} as "{style}", which is not known here.',
                hint='Give it another style in the tensor_plan of the backend, "replicate" for one, or set [parallel] tensor = 1.',
            )
        found[name] = style
    return found
