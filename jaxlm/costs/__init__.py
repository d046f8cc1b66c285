"""What a model costs before it runs: FLOPs, bytes, memory, time, money and energy, counted."""
