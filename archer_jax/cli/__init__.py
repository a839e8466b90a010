"""The command line of run_decode.py."""

from archer_jax.cli.command import main
from archer_jax.cli.command import run

__all__ = ['main', 'run']
