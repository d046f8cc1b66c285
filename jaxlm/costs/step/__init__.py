"""What one step of a model computes, holds and sends on each device, in closed form over the abstract tree."""
