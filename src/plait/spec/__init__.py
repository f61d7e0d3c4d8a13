"""WHAT: frozen, validated data that describes a run. No torch, no devices, no files but TOML."""
