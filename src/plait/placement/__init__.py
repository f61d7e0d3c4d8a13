"""WHERE: one record per tensor says how it is cut, who holds it, and which groups sum its gradient. No torch."""

from plait.placement.place import Placement, ZeroSlice, place
from plait.placement.stages import StageMap, stage_map

__all__ = ["Placement", "StageMap", "ZeroSlice", "place", "stage_map"]
