"""Decoding methods of others, to compare with: a file each. `pypcd.decode` has their names."""
