"""Full recomputation with its figures: what reuse is measured against.

python run_decode.py --config=configs/decode_reference.py --input=FILE.jsonl --output=NEW.jsonl
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  config = ml_collections.ConfigDict()
  config.refresh = 'always'
  config.stats = True
  return config
