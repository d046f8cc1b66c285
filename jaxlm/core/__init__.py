"""Errors, files, output, units and configuration schema; nothing about models."""
