"""A step of plait's own trainer in sizes alone: its operations, births and deaths, without torch and without values."""
