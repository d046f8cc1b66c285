"""The cost model: FLOPs, bytes, memory, time, money and energy of a run, counted before it is paid for."""
