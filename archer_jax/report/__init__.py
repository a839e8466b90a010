"""What a person reads: the live view and the figures of a run."""
