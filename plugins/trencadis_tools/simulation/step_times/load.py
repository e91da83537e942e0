"""Step times by name: a file that was fitted, or a device sheet, of this package or of one's own, with a model."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import attrs

from trencadis.errors import ConfigError, did_you_mean
from trencadis.files import is_file
from trencadis_tools.simulation.step_shape import StepTimes
from trencadis_tools.simulation.step_times.files import read_step_times
from trencadis_tools.simulation.step_times.model_sizes import ModelSizes, read_model_sizes
from trencadis_tools.simulation.step_times.sheets import (
    FORMS,
    DeviceSheet,
    SheetStepTimes,
    read_sheet,
    read_sheet_file,
    sheet_names,
)

__all__ = ["load_step_times"]

_SHEET_FILE: Final = ".toml"


def load_step_times(name_or_path: str | Path) -> StepTimes:
    """Return step times.

    Args:
        name_or_path: A file that ``trencadis bench fit --out`` wrote, or ``SHEET:MODEL``, with ``:tpN`` for N ranks and a form of
            :mod:`.sheets` after it: ``h100:llama_3_1_70b:tp4:roofline``. A sheet is one of this package by its name, or a TOML file:
            ``my_device.toml:llama_3_1_8b``. See :func:`read_model_sizes` for models.

    Raises:
        ConfigError: There is no such file, sheet or model.
    """
    text = str(name_or_path)
    sheet, rest = _split(text)
    if sheet not in sheet_names() and not sheet.endswith(_SHEET_FILE):
        if text.endswith(".json") or is_file(text):
            return read_step_times(text)
        raise ConfigError(
            f"step times {text!r}: that is no file, and no device sheet.{did_you_mean(sheet, sheet_names())}",
            hint="Name a file of trencadis bench fit --out, or SHEET:MODEL such as h100:llama_3_1_8b or my_device.toml:llama_3_1_8b. "
            f"Sheets: {', '.join(sheet_names())}.",
        )
    model, *options = rest.split(":")
    if not model:
        raise ConfigError(
            f"step times {text!r} depend on the model.",
            hint=f"Name it, such as {sheet}:llama_3_1_8b, or {sheet}:DIRECTORY.",
        )
    tensor, form = 1, FORMS[0]
    for option in options:
        if option in FORMS:
            form = option
        elif option.startswith("tp") and option[2:].isdecimal() and int(option[2:]):
            tensor = int(option[2:])
        else:
            raise ConfigError(f"step times {text!r}: {option!r} is neither tpN nor one of {', '.join(FORMS)}.")
    device = read_sheet_file(Path(sheet)) if sheet.endswith(_SHEET_FILE) else read_sheet(sheet)
    return SheetStepTimes(model=_held(read_model_sizes(model), device), device=device, tensor=tensor, form=form)


def _split(text: str) -> tuple[str, str]:
    """Return the name or file of a sheet, and what comes after its colon. Pure."""
    head, ending, rest = text.partition(_SHEET_FILE)
    if ending and (not rest or rest.startswith(":")):
        return head + ending, rest[1:]
    sheet, _, rest = text.partition(":")
    return sheet, rest


def _held(model: ModelSizes, device: DeviceSheet) -> ModelSizes:
    """Return a model as a device holds it: as float32 where it computes in nothing narrower, as backends do there. Pure."""
    if model.dtype in ("bfloat16", "float16") and list(device.flops) == ["float32"]:
        return attrs.evolve(model, dtype="float32", weight_bytes=4.0, activation_bytes=4.0)
    return model
