"""The step, the optimizer, the loop, the sinks: a run from its first line to its last, on whatever layout."""
