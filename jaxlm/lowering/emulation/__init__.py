"""NVIDIA machine code run on a CPU: what the compilers made of a kernel for a chip that is not here, computed thread by
thread in numpy. Slow, and right but for the last bits of approximations and of tensor cores' sums."""
