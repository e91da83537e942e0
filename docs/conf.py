"""Sphinx configuration of the documentation site: Markdown by MyST, the theme furo, nothing from other hosts.

Build: ``sphinx-build -W docs OUT``.
"""

from __future__ import annotations

from importlib.metadata import version as version_of

project = "Trencadís"
author = "The Trencadís authors"
copyright = author  # noqa: A001 - Sphinx reads this name
release = version = version_of("trencadis")

extensions = ["myst_parser"]
exclude_patterns = ["decisions/0000-template.md"]
nitpicky = True

myst_heading_anchors = 3

html_theme = "furo"
html_title = f"Trencadís {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b5d7a", "color-brand-content": "#0b5d7a"},
    "dark_css_variables": {"color-brand-primary": "#5bb8d6", "color-brand-content": "#5bb8d6"},
}
