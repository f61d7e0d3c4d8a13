"""How a run is split over devices: the mechanisms of torch.distributed, one file per axis, and the local launcher.

It knows specs, placements, schedules and the model; none of them knows it. Whoever communicates is given its group.
"""
