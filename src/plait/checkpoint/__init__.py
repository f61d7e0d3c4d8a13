"""Weights, optimizer state and counters in files, under global names that no layout shows in.

files (safetensors, with checksums) -> manifest (what a checkpoint is) -> shelf (the checkpoints of a run) ->
save (from a snapshot, beside training) and source (any rectangle of any tensor, read by whoever needs it).
"""
