"""What an architecture is: its configuration, its Flax NNX modules and its abstract tree."""
