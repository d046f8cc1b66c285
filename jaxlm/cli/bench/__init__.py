"""Measure beside what is counted: kernels on this machine, or a server under a load."""

from jaxlm.cli.bench import kernels, serve

PARTS = kernels, serve
