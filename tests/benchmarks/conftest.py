"""The benchmarks are scripts in a folder of their own."""

from pathlib import Path
import sys

FOLDER = Path(__file__).parents[2] / 'benchmarks'
# Before tests are collected, which import them.
sys.path.insert(0, str(FOLDER))
