"""Matrices whose numbers are stored in eight or four bits: their kinds, and products that make numbers of them."""
