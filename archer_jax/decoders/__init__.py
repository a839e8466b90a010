"""The decoders: which tokens a step commits and takes back. One file each, one interface (`base.Decoder`)."""

from archer_jax.decoders.base import Decoder
from archer_jax.decoders.base import Update
from archer_jax.decoders.dream import Dream
from archer_jax.decoders.llada import LLaDA
from archer_jax.decoders.wino import Wino

DECODERS: dict[str, Decoder] = {'wino': Wino(), 'llada': LLaDA(), 'dream': Dream()}

__all__ = ['DECODERS', 'Decoder', 'Update']
