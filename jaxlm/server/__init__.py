"""An OpenAI-compatible server of a model that an engine runs."""
