"""Converts a Hugging Face folder of LLaDA or Dream to a checkpoint: `archer-convert`, from a checkout."""

from archer_jax.cli import convert

if __name__ == '__main__':
  convert.run()
