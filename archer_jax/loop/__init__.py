"""The loop: state, step, decode, slots; it knows no method by name."""
