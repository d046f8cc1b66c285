"""Errors, files, output, units and configuration schema: nothing of models."""
