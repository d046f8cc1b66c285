"""Vocabularies in other files than a tokenizer.json, read as data and converted to one."""
