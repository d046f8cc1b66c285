"""A load of requests for any server that speaks OpenAI's API, and what it measures."""
