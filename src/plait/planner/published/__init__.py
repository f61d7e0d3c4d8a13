"""Runs that others measured and published: read, judged, predicted, and the constants that follow from them."""
