"""What the process needs before it can train: device, process group, seeds, logging, garbage collection."""
