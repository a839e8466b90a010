"""Archer: diffusion language model decoding with reuse of the prompt under rollback."""
