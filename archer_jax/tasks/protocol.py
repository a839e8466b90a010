"""What the papers on Saber and Archer ask of every benchmark: where a prompt ends, and how long answers are.

A problem is a user's turn in the checkpoint's chat template, and the answer may begin with given text (an open code
block, the head of a function), so that the prompt ends inside the assistant's turn. Where a checkpoint has no chat
template, the same texts follow one another with an empty line between them.
"""

from typing import Any

from archer_jax.tasks import SEPARATOR
from archer_jax.tasks.sandbox import Limits

# Tokens of an answer, decoded in one block.
GEN_LENGTH = 256
# Of all tests of an extended set together, about a hundred: HumanEval/39's published solution needs 14 s for its own.
MORE_TESTS_LIMITS = Limits(wall_seconds=120, cpu_seconds=30)


def render(turn: str, begin: str = '', tokenizer: Any = None) -> str:
  """The text that the model reads, up to where its own part of the answer begins.

  Args:
    turn: what the user says.
    begin: how the answer begins.
    tokenizer: the checkpoint's `text.Tokenizer`; None reads as one without a chat template.
  """
  if tokenizer is None or tokenizer.hf.chat_template is None:
    return f'{turn}{SEPARATOR}{begin}'
  messages = [{'role': 'user', 'content': turn}]
  return tokenizer.hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) + begin
