"""Why a step refreshes."""

import enum


class Reason(enum.IntFlag):
  """The clauses of the policy that held, as bits; 0 for a reuse."""

  FIRST = 1  # no anchor yet
  INTERVAL = 2  # its turn by the clock
  BLOCK_START = 4  # a new block
  MAX_AGE = 8  # kept for too long
  DRIFT = 16  # embeddings or hidden states of the canvas are further from their anchor than the radius
  MARGIN = 32  # the reuse before decided with less than min_margin
  CERTIFICATE = 64  # the reuse before decided with no more than kappa times its drift
  SAME_STEP = 128  # this step reused first; its own margin failed the bits MARGIN or CERTIFICATE
  DISTANCE = 256  # at least K positions of the canvas differ from its anchor
