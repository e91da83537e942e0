"""The site builds without a warning, and a reader's browser asks no other host for anything."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = (
    pytest.mark.slow
)  # twenty seconds for the build; blocks, words and generated pages are looked at without it

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


def test_site_has_its_shelves(site: Path) -> None:
    front = (site / "index.html").read_text(encoding="utf-8")
    for shelf in ("Learn", "Serve", "Move", "Operate", "Devices", "Speed", "Laboratory", "Know", "Why"):
        assert f">{shelf}<" in front
    pages = {str(path.relative_to(ROOT / "docs").with_suffix(".html")) for path in (ROOT / "docs").rglob("*.md")}
    assert pages - {"decisions/0000-template.html"} <= {str(path.relative_to(site)) for path in site.rglob("*.html")}


def test_pages_load_nothing_from_another_host(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not LOADING.findall(text), page.name
        assert not STYLE.findall(text), page.name


def test_styles_load_nothing_from_another_host(site: Path) -> None:
    styles = list(site.rglob("*.css"))
    assert styles
    for style in styles:
        assert not STYLE.findall(style.read_text(encoding="utf-8")), style.name


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


def test_the_picture_has_a_text_and_takes_the_colours_of_the_page(site: Path) -> None:
    text = (site / "why/concepts.html").read_text(encoding="utf-8")
    picture = text[text.index('<svg class="life"') :].partition("</svg>")[0]
    assert "<title" in picture
    assert "<desc" in picture
    assert "currentColor" in picture
    assert not re.search(r'(?:fill|stroke)="#', picture)
