"""Jobs: requests in, batches through the loop, results out. The command line and `archer_jax.generate` share it."""
