"""The command lines of archer-decode, archer-convert and archer-calibrate."""

from archer_jax.cli.command import main
from archer_jax.cli.command import run

__all__ = ['main', 'run']
