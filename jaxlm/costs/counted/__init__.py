"""One step of a model on each device: FLOPs, memory and collectives, counted from the recording of the model."""
