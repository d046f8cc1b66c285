"""Answers as families of models write them: what is thought, what is said, and calls of tools."""
