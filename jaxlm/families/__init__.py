"""Published model families: their Hugging Face names, configurations and weights, both ways."""
