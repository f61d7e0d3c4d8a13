"""HOW GOOD: memory and time of a run that has not started, the search for a better split, and what others measured."""
