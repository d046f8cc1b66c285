"""Hardware: the catalog of chips, targets of several chips, their network, and this machine as measured."""
