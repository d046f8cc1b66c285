"""What a run costs before it is paid for: chips, counting, memory and time."""
