"""Step times by data sheet against times that others measured: Llama 2 70B on A100 and H100, by ranks, prompt and batch size.

    python benchmarks/validation/data_sheets.py ../shared/data/calibration/splitwise_perf_model.csv --json

The file is data/perf_model.csv of github.com/Mutinifni/splitwise-sim (MIT): vLLM of 2023, a prompt pass of equal prompts, and the mean of
the steps that followed. Errors are predicted by measured time, minus 1; each row counts the median of its repetitions. A prompt pass that
is said to have been faster than the roofline was none: 64 prompts on two ranks, which their memory has no room for. It is left out.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from trencadis.records import StepShape
from trencadis_tools.simulation.step_times import FORMS, load_step_times

SHEETS = {"a100-80gb": "a100", "h100-80gb": "h100"}


def measured(path: Path) -> dict[tuple[str, int, int, int, int], tuple[float, float]]:
    """Return medians of prompt and token time, seconds, by sheet, ranks, prompt tokens, batch size and output tokens."""
    rows: dict[tuple[str, int, int, int, int], list[tuple[float, float]]] = defaultdict(list)
    with path.open(newline="") as lines:
        for row in csv.DictReader(lines):
            if row["model"] != "llama2-70b" or row["hardware"] not in SHEETS:
                continue
            tensor, prompt, batch, output = (
                int(row[name]) for name in ("tensor_parallel", "prompt_size", "batch_size", "token_size")
            )
            rows[SHEETS[row["hardware"]], tensor, prompt, batch, output].append(
                (float(row["prompt_time"]) / 1e3, float(row["token_time"]) / 1e3)
            )
    return {
        sizes: (statistics.median(one for one, _ in times), statistics.median(other for _, other in times))
        for sizes, times in rows.items()
    }


def compare(path: Path) -> list[dict[str, Any]]:
    """Return one row for each sheet, form and kind of step."""
    errors: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for (sheet, tensor, prompt, rows, output), (prompt_s, token_s) in measured(path).items():
        tokens = rows * prompt
        prefill = StepShape(
            num_prefills=rows,
            num_prefill_tokens=tokens,
            num_prefill_context=tokens,
            prefill_products=tokens * (prompt + 1) / 2,
        )
        decode = StepShape(
            num_decodes=rows, num_decode_tokens=rows, num_decode_context=int(rows * (prompt + output / 2))
        )
        bound_s = load_step_times(f"{sheet}:llama_2_70b:tp{tensor}:roofline").device_s(prefill)
        if prompt_s < bound_s:
            continue
        for form in FORMS:
            times = load_step_times(f"{sheet}:llama_2_70b:tp{tensor}:{form}")
            errors[sheet, form, "prefill"].append(times.device_s(prefill) / prompt_s - 1)
            errors[sheet, form, "decode"].append(times.device_s(decode) / token_s - 1)
    return [
        {
            "sheet": sheet,
            "form": form,
            "kind": kind,
            "num_sizes": len(found),
            "median_error": round(statistics.median(found), 3),
            "least_error": round(min(found), 3),
            "largest_error": round(max(found), 3),
            "mean_absolute_error": round(statistics.fmean(map(abs, found)), 3),
        }
        for (sheet, form, kind), found in sorted(errors.items())
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    rows = compare(args.file)
    if args.json:
        print(json.dumps({"source": args.file.name, "rows": rows}, indent=1))
        return
    for row in rows:
        print(*row.values(), sep="\t")


if __name__ == "__main__":
    main()
