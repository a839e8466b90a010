"""The process around a run: the compilation cache, and the facts that a result may depend on.

Besides the command line this is the only place that touches `jax.config` or the environment.
"""

from importlib import metadata
import os
from pathlib import Path
import platform
from typing import Any


def cache_folder() -> Path:
  """The folder of compiled programs in the user's own cache directory."""
  home = os.environ.get('XDG_CACHE_HOME', '')
  # A relative path is to be ignored, says the XDG base directory specification.
  base = Path(home) if Path(home).is_absolute() else Path.home() / '.cache'
  return base / 'archer_jax' / 'xla'


def set_up() -> None:
  """Makes JAX keep compiled programs between runs, unless the user has told it where already.

  A folder that cannot be made only costs the time to compile again.
  """
  import jax

  if jax.config.jax_compilation_cache_dir is not None:
    return
  try:
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
  except (OSError, RuntimeError):
    return
  jax.config.update('jax_compilation_cache_dir', str(folder))
  # Many small programs make the start slow; the default keeps only what took a second.
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.2)


def default_dtype() -> str:
  """The dtype to decode in where nobody chose one: bfloat16, except on CPUs, which mostly emulate it."""
  import jax

  return 'float32' if jax.default_backend() == 'cpu' else 'bfloat16'


def facts() -> dict[str, Any]:
  """Versions, devices and precision, as a result file states them."""
  import jax
  import jaxlib

  try:
    version = metadata.version('archer_jax')
  except metadata.PackageNotFoundError:
    version = None
  device = jax.devices()[0]
  return {
    'archer_jax': version,
    'jax': jax.__version__,
    'jaxlib': jaxlib.__version__,
    'python': platform.python_version(),
    'backend': jax.default_backend(),
    'device': device.device_kind,
    'platform_version': device.client.platform_version.splitlines()[0],
    'matmul_precision': jax.config.jax_default_matmul_precision,
  }
