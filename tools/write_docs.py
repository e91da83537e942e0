"""Write the generated pages of the documentation: configuration, errors, hooks, answers, metrics, commands, HTTP fields, records.

Example: `python tools/write_docs.py`; with `--check` nothing is written, and pages that are not current are named.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from docs_pages import PAGES

DOCS = Path(__file__).resolve().parents[1] / "docs"


def main(arguments: list[str] | None = None) -> int:
    """Write or check every page; return 1 if a checked page is not current, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="write nothing; name the pages that are not current")
    check: bool = parser.parse_args(arguments).check
    num_stale = 0
    for name, make in PAGES.items():
        page, text = DOCS / name, make()
        if page.exists() and page.read_text(encoding="utf-8") == text:
            continue
        num_stale += 1
        print(f"docs/{name} {'is not current' if check else 'written'}")
        if not check:
            page.parent.mkdir(exist_ok=True)
            page.write_text(text, encoding="utf-8")
    return int(check and num_stale > 0)


if __name__ == "__main__":
    sys.exit(main())
