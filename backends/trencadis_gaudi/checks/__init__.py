"""``trencadis gaudi-check``: tests on the device each fact that this backend relies on, and says what each means.

command ─▶ processes: one for each mode, with a time limit ─▶ child: runs the checks of the table ─▶ report
"""
