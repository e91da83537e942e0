from __future__ import annotations

import numpy as np

from trencadis.records import TableWrites
from trencadis_gaudi.host_tables import HostTables


def test_of_two_writes_to_one_entry_the_later_counts():
    tables = HostTables(2, 3)
    columns = (np.array(part, np.int32) for part in ([0, 1, 0], [2, 0, 2], [7, 8, 9]))
    tables.apply(TableWrites(**dict(zip(("rows", "columns", "block_ids"), columns, strict=True))))
    assert tables.blocks.tolist() == [[0, 0, 9], [8, 0, 0]]
