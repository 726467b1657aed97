"""A setting of PCD: its fields and their ranges, presets and how it is written (config), the formula in numpy."""
