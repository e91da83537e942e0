"""``python -m trencadis_server.protocol`` writes the reference page of the API's fields."""

from __future__ import annotations

import sys

from trencadis_server.protocol.fields_page import fields_page

if __name__ == "__main__":
    sys.stdout.write(fields_page())
