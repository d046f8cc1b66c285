"""Runs and published models: their folders, what can be had of them, and the job that trains one."""
