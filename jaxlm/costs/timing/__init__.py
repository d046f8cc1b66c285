"""The time of a step: what no program beats, what a well-tuned program takes, and how uncertain that is."""
