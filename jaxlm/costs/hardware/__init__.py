"""What a step runs on: the catalog of chips, chips that work together, their network, and this machine as measured."""
