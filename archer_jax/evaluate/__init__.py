"""Quality and speed of decoding settings side by side, on tasks with exact graders: `python -m archer_jax.evaluate`."""
