"""``trencadis gaudi-check``: tests on the device the facts that this backend relies on, with the consequence of each.

command ─▶ processes: one for each mode, with a time limit ─▶ child: runs the checks of the table ─▶ report
"""
