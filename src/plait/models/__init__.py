"""The network on ONE device, in plain PyTorch: it reads like the paper and never learns that it is parallel."""
