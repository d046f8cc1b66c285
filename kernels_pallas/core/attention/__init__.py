"""Masks, the mathematics of scores, and the reference, for attention over whole keys and over pages."""
