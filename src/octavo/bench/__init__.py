"""Measurements in turn, their results as tables and pages, and the benchmark of serving (``octavo bench serve``)."""
