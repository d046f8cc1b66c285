"""One step of a model on each device: FLOPs, memory and collectives, in closed form over the abstract tree."""
