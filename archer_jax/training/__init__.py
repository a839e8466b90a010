"""Training of small masked diffusion models with optax."""
