"""Where the generator of bad requests is: with the benchmark that uses it for minutes."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks" / "soak"))
sys.path.insert(0, str(ROOT / "tests" / "support"))
