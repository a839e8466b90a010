"""A character-level tokenizer in the files that `transformers.AutoTokenizer` reads."""

import json
from pathlib import Path
import string

from tokenizers import Regex
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

PAD, EOS, MASK = '<|pad|>', '<|eos|>', '<|mask|>'
# Newline, tab and every printable ASCII character, in the order of their code points.
CHARACTERS = tuple(sorted('\n\t ' + string.ascii_letters + string.digits + string.punctuation))
VOCAB = {token: i for i, token in enumerate((PAD, EOS, MASK, *CHARACTERS))}


def save_char_tokenizer(directory: str | Path) -> None:
  """Writes tokenizer.json and tokenizer_config.json for the fixed vocabulary of 100 tokens.

  One character is one token, `encode` adds none, and `decode` gives back exactly the text. A character outside the
  vocabulary makes `encode` raise: there is no unknown token for it to vanish in.

  Args:
    directory: where to write; made if it is not there.
  """
  directory = Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  tokenizer = Tokenizer(WordLevel(VOCAB))
  # A plain `.` would leave the newline out.
  tokenizer.pre_tokenizer = Split(Regex(r'[\s\S]'), behavior='isolated')
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
