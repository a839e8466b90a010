"""Archer's own method: the prompt is kept, the canvas is always fed.

method    what it declares, and how a step goes
state     anchors, kept keys and values        reasons   why a step refreshes
drift     how far the canvas is from an anchor  clauses   which reasons hold
pool      more anchors than one                 forward   refresh, reuse, and the rows of mixed batches
"""

from archer_jax.reuse.prompt.method import METHOD

__all__ = ['METHOD']
