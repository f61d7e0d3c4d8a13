"""WHERE: one record per tensor says how it is cut, who holds it, and over which groups its gradient is a sum. No torch."""

from plait.placement.place import Placement, ZeroSlice, place
from plait.placement.stages import StageMap, stage_map

__all__ = ["Placement", "StageMap", "ZeroSlice", "place", "stage_map"]
