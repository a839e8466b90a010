"""The tokenizer of the bundled tasks, in the files that `transformers.AutoTokenizer` reads."""

import json
from pathlib import Path
import re
import string

from tokenizers import Regex
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from archer_jax.tasks import table

PAD, EOS, MASK = '<|pad|>', '<|eos|>', '<|mask|>'
# Newline, tab, every printable ASCII character, and the others that HumanEval has, in the order of their code points.
CHARACTERS = tuple(sorted('\n\t ' + string.ascii_letters + string.digits + string.punctuation + '≤➞'))
# fmt: off
_PYTHON = (
  '    ', 'def', ' solve(', '):', 'return', ' =', ' [', ' +', ' *', ' >', ' <', 'max(', ' max(', 'min(', ' min(',
  ' for', ' in', ' if v', ' v', ' v:', ' list(', ' list(map(', 'filter(', 'lambda', '))', '::-1', ' sorted(', 'sorted(',
  'reversed(', 'reverse=', 'True', ' a', ' b', ' c', ' d', ' e', ' f',
)
_DESCRIPTION = (
  'pipeline', 'code', 'solve([', ', ', ']) == [', ' add', ' multiply', ' raise', ' cap', ' keep', ' reverse', ' sort',
  ' to', ' by', ' at', ' above', ' below', ' down',
)
_NAMES = ('sudoku4', 'sudoku6', 'sort', 'table', 'find', 'countdown')
# fmt: on
WORDS = (*_PYTHON, *_DESCRIPTION, *_NAMES, *(f' {color}' for color in table.COLORS), *table.NAMES)
# Digit by digit, the order of a number's two digits came late where the number itself was long found.
NUMBERS = tuple(str(number) for number in range(10, 100))
VOCAB = {token: i for i, token in enumerate((PAD, EOS, MASK, *CHARACTERS, *WORDS, *NUMBERS))}

# The longest word that fits, else two digits that stand alone, else one character. A plain `.` would leave the
# newline out.
_PIECES = '|'.join(
  [*(re.escape(word) for word in sorted(WORDS, key=len, reverse=True)), r'(?<!\d)[1-9]\d(?!\d)', r'[\s\S]']
)


def save_tokenizer(directory: str | Path) -> None:
  """Writes tokenizer.json and tokenizer_config.json for the fixed vocabulary.

  The words of the bundled tasks and the numbers from 10 to 99 are one token each, everything else, longer numbers too,
  goes character by character; `encode` adds none, and `decode` gives back exactly the text. A character that is not in
  CHARACTERS makes `encode` raise: there is no unknown token for it to vanish in.

  Args:
    directory: where to write; made if it is not there.
  """
  directory = Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  tokenizer = Tokenizer(WordLevel(VOCAB))
  tokenizer.pre_tokenizer = Split(Regex(_PIECES), behavior='isolated')
  tokenizer.decoder = Fuse()
  tokenizer.add_special_tokens([PAD, EOS, MASK])
  tokenizer.save(str(directory / 'tokenizer.json'))
  config = {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    'pad_token': PAD,
    'eos_token': EOS,
    'mask_token': MASK,
    # The default of some versions deletes spaces before punctuation.
    'clean_up_tokenization_spaces': False,
  }
  (directory / 'tokenizer_config.json').write_text(json.dumps(config, indent=2) + '\n')
