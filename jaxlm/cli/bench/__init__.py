"""Measure beside what is counted: kernels and decoding on this machine, or a server under a load."""

from jaxlm.cli.bench import decode, kernels, serve

PARTS = kernels, decode, serve
