"""Drafting: the schedule of levels, its program and state, lookups, sources, rows."""
