"""Several engines, each in a process of its own, behind one client: routing, continuation after a death, restarts."""
