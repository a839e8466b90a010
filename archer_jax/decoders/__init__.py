"""The decoders: which tokens a step commits and takes back. One file each, found by its name, one interface."""
