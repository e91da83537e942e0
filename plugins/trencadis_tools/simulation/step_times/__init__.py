"""Models of step times: fitted from measured steps, or computed from the data sheet of a device."""

from __future__ import annotations

from trencadis_tools.simulation.step_times.buckets import BucketStepTimes
from trencadis_tools.simulation.step_times.errors import KindErrors, step_time_errors
from trencadis_tools.simulation.step_times.files import read_step_times, step_times_json
from trencadis_tools.simulation.step_times.fit import Coefficient, Fit, fit_step_times
from trencadis_tools.simulation.step_times.linear import LinearStepTimes
from trencadis_tools.simulation.step_times.load import load_step_times
from trencadis_tools.simulation.step_times.model_sizes import ModelSizes, read_model_sizes
from trencadis_tools.simulation.step_times.records import StepRecord, StepRecords, read_records, steady
from trencadis_tools.simulation.step_times.sheets import (
    FORMS,
    DeviceSheet,
    Factors,
    SheetStepTimes,
    StepParts,
    parse_sheet,
    read_sheet,
    read_sheet_file,
    sheet_names,
)

__all__ = [
    "BucketStepTimes",
    "Coefficient",
    "DeviceSheet",
    "FORMS",
    "Factors",
    "Fit",
    "KindErrors",
    "LinearStepTimes",
    "ModelSizes",
    "SheetStepTimes",
    "StepParts",
    "StepRecord",
    "StepRecords",
    "fit_step_times",
    "load_step_times",
    "parse_sheet",
    "read_model_sizes",
    "read_records",
    "read_sheet",
    "read_sheet_file",
    "read_step_times",
    "sheet_names",
    "steady",
    "step_time_errors",
    "step_times_json",
]
