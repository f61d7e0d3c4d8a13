"""plait beside what a user would pick instead, axis by axis, in one run: `python -m benchmarks`, or `make bench`.

    work.py           the model, the batch and the run that every side is given
    plait_side.py     plait, as a user runs it
    floor.py          the same step without communication
    peers.py          PyTorch's own loop, DistributedDataParallel and pipelining
    sharded_peers.py  PyTorch's fully_shard, and DeepSpeed (optional: requirements-peers.txt)
    sleeping.py       pipelines whose stages sleep, on 4 and 8 ranks
    tensor_peer.py    PyTorch's tensor parallelism, on a plain Llama
    contest.py        which sides meet, on how many ranks; equal gradients first, then turns by the clock
    peak.py           peak memory of a side
    memory.py         recompute and the loss in chunks beside torch's own: a command of its own
    verdict.py        from times to medians, ratios and intervals
    table.py          from result files to docs/benchmarks.md

What is measured, and how the floor is made, stands in docs/benchmarks.md.
"""
