"""PICTURES: tables and timelines of a run, frozen values that print as text or as one JSON document. No torch."""
