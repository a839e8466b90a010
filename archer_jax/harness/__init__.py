"""lm-evaluation-harness with this package's decoders: `python -m archer_jax.harness --model archer ...`.

lm-evaluation-harness finds models in its own registry alone, so a program that knows `archer` has to import
`archer_jax.harness.model` first; the command above does, and has the flags of `lm_eval`.
"""
