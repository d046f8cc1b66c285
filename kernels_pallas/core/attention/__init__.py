"""What all kernels of attention share, whole or paged: masks, the mathematics of scores, and the reference."""
