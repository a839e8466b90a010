r"""Whether two answers in LaTeX mean the same: reads a JSON list of the right one and another, writes True or False.

It is a process of its own because a model may write a number that no computer holds, such as `9^{9^{9^9}}`: that ends
this process and nothing else, as memory and processor time are limited. math-verify's own limit is an alarm, which a
long multiplication does not hear and a thread cannot set.
"""

import json
import logging
import resource
import sys

# The libraries take 200 MB.
MEMORY_BYTES = 4 << 30


def equal(right: str, other: str) -> bool:
  """Whether the two mean the same."""
  from math_verify import LatexExtractionConfig
  from math_verify import parse
  from math_verify import verify

  config = [LatexExtractionConfig(boxed_match_priority=0)]
  read = [parse(f'$\\boxed{{{text}}}$', extraction_config=config, parsing_timeout=None) for text in (right, other)]
  return bool(verify(*read, timeout_seconds=None))


def main() -> None:
  """Reads, decides within the seconds of processor time that the argument says, and writes."""
  (seconds,) = map(int, sys.argv[1:])
  resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
  resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
  # The library warns that its own limit is off.
  logging.disable()
  try:
    answer = equal(*json.load(sys.stdin))
  except (MemoryError, RecursionError):
    answer = False
  sys.stdout.write(str(answer))


if __name__ == '__main__':
  main()
