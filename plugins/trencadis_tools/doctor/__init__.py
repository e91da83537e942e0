"""``trencadis doctor``: find problems of an installation, a configuration or a plugin, and their remedies.

Works where nothing else does: with a broken plugin, a config file that is no TOML, or a package too old.
"""

from __future__ import annotations

from trencadis_tools.doctor.examine import examine
from trencadis_tools.doctor.findings import Findings, SectionFinding

__all__ = ["Findings", "SectionFinding", "examine"]
