"""From requests to batches, slots and results."""
