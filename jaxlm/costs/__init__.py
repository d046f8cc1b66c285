"""What a run costs before it is paid for: FLOPs, bytes, memory, time, money and energy, counted."""
