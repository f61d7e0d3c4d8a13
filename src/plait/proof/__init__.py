"""The same run on one device and on a layout, compared: what `plait verify` prints."""
