"""The site builds without a warning, and a reader's browser asks no other host for anything."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # blocks, words and generated pages are looked at without the build

ROOT = Path(__file__).parents[2]
LOADING = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed|object|use)\b[^>]*?\b(?:src|srcset|data|href|xlink:href)\s*=\s*["']?\s*(?:https?:)?//[^>]*>"""
    r"""|<link\b(?=[^>]*\brel\s*=\s*["']?[^"'>]*(?:stylesheet|icon|preload|prefetch|preconnect|modulepreload|manifest))"""
    r"""[^>]*\bhref\s*=\s*["']?\s*(?:https?:)?//[^>]*>""",
    re.IGNORECASE,
)
STYLE = re.compile(r"""(?:url\(\s*["']?|@import\s+["'])\s*(?:https?:)?//[^)"']*""", re.IGNORECASE)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with warnings as errors."""
    pytest.importorskip("sphinx", reason="the site needs the extra docs")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", str(out / "trees")]
    result = subprocess.run(
        [*command, str(ROOT / "docs"), str(out / "html")], capture_output=True, text=True, check=False, timeout=600
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return out / "html"


def test_site_has_its_shelves_and_loads_nothing_from_another_host(site: Path) -> None:
    front = (site / "index.html").read_text(encoding="utf-8")
    for shelf in ("Learn", "Serve", "Move", "Operate", "Devices", "Speed", "Laboratory", "Know", "Why"):
        assert f">{shelf}<" in front
    pages = {str(path.relative_to(ROOT / "docs").with_suffix(".html")) for path in (ROOT / "docs").rglob("*.md")}
    assert pages - {"decisions/0000-template.html"} <= {str(path.relative_to(site)) for path in site.rglob("*.html")}
    for file in [*site.rglob("*.html"), *site.rglob("*.css")]:
        text = file.read_text(encoding="utf-8")
        assert not STYLE.findall(text), file.name
        assert file.suffix == ".css" or not LOADING.findall(text), file.name
    concepts = (site / "why/concepts.html").read_text(encoding="utf-8")
    picture = concepts[concepts.index('<svg class="life"') :].partition("</svg>")[0]
    assert all(part in picture for part in ("<title", "<desc", "currentColor"))
    assert not re.search(r'(?:fill|stroke)="#', picture)


@pytest.mark.parametrize(
    "text",
    [
        '<link rel="stylesheet" href="https://fonts.example/css">',
        '<link href="//cdn.example/a.css" rel=stylesheet>',
        '<script async src="https://cdn.example/a.js"></script>',
        "<img alt='x' src='http://example/a.png'>",
    ],
)
def test_an_asset_of_another_host_would_be_found(text: str) -> None:
    assert LOADING.search(text)


def test_a_font_of_another_host_would_be_found() -> None:
    assert STYLE.search("@font-face { src: url('https://fonts.example/a.woff2') }")
    assert not LOADING.search(
        '<a href="https://example.org">to read</a><link rel="canonical" href="https://example.org">'
    )
