"""The paper's experiments, a module each, and what they share.

A table is a module with these names:

- `pieces(bench) -> list[Piece]`: what it measures, in parts that are each done or not when a run is killed;
- `measure(bench, piece) -> value`: measures a part; the value goes through JSON;
- `report(bench, found) -> Report`: rows and what they say, from the values of all pieces that are there;
- `draw(report) -> Figure`.
"""
