"""WHERE: one record per tensor says how it is cut, who holds it, and which groups sum its gradient. No torch."""

from plait.placement.buffer import Buffer, Piece, buffers
from plait.placement.place import Placement, place
from plait.placement.stages import StageMap, stage_map, stages_of

__all__ = ["Buffer", "Piece", "Placement", "StageMap", "buffers", "place", "stage_map", "stages_of"]
