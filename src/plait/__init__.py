"""plait: train transformer language models split along every axis, and prove that the split equals one device."""

__version__ = "0.1.0"
