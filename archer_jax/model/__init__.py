"""The diffusion transformer of the LLaDA and Dream families, in Flax Linen. Flax is imported in this folder only."""

from archer_jax.model.attention import attend
from archer_jax.model.params import abstract_params
from archer_jax.model.params import init_params
from archer_jax.model.transformer import Transformer

__all__ = ['Transformer', 'abstract_params', 'attend', 'init_params']
