"""Prefill and decode steps, the key/value cache, sampling, generation."""
