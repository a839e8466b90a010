"""MBPP from a file whose problems have more tests: MBPP's fields and `test_case_list`, one problem a line.

The same answer is judged twice: by MBPP's own tests, and by those of the list.
"""

import functools

from archer_jax.tasks import mbpp

read_problems = functools.partial(mbpp.read_problems, extended=True)
is_solved = mbpp.is_solved
ALSO = {'et': mbpp.passes_more}
