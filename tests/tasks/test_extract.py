"""Answers taken out of good, odd and bad completions."""

import pytest

from archer_jax.tasks.extract import EXTRACTORS
from archer_jax.tasks.extract import extract
from archer_jax.tasks.extract import is_equal

NUMBERS = [
  # GSM8K's own form, and what models make of it.
  ('She has 16 - 3 - 4 = <<16-3-4=9>>9 eggs.\n#### 18', '18'),
  ('#### 1,234', '1234'),
  ('####18', '18'),
  ('#### $1,234.50', '2469/2'),
  ('#### -7', '-7'),
  ('#### 18.', '18'),
  ('#### 18.0', '18'),
  ('#### 018', '18'),
  ('#### 18 dollars', '18'),
  ('#### 18\n\nQuestion: Tom has 5 apples.\n#### 5', '18'),
  ('#### -$5', '-5'),
  ('#### $-5', '-5'),
  ('#### \u22125', '-5'),
  ('#### .5', '1/2'),
  ('#### 1,000,000', '1000000'),
  # A box, the last one, with whatever LaTeX puts into it.
  (r'So \boxed{18}.', '18'),
  (r'\boxed{3} is wrong, \boxed{4} is right, and 5 is no answer.', '4'),
  (r'\boxed{1{,}234}', '1234'),
  (r'\boxed{1\,234}', '1234'),
  (r'\boxed{\$18.00}', '18'),
  (r'\boxed{18\text{ dollars for {2} days}}', '18'),
  (r'\boxed{\frac{3}{4}}', '3/4'),
  (r'\boxed{-\dfrac{6}{8}}', '-3/4'),
  (r'\boxed{0.75}', '3/4'),
  (r'\boxed{3/4}', '3/4'),
  # Stated in words.
  ('The answer is 18. There are 2 left.', '18'),
  ('the answer is: $18', '18'),
  ('The final answer is **18**.', '18'),
  (r'The answer is \(18\), not 19.', '18'),
  (r'The answer is $18$ of 20.', '18'),
  ('Answer: 18\nCheck: 9 * 2', '18'),
  ('**Answer:** 18 of 20', '18'),
  ('The answer is 3. No: the answer is 4, since 2 is even.', '4'),
  ('The answer is 5 + 3 = 8', '8'),
  ('The answer is 10-2=8', '8'),
  ('The answer is \\boxed{6} (of 7)', '6'),
  # Nothing but numbers.
  ('10 - 2 leaves 8', '8'),
  ('16-3', '3'),
  ('it fell to -3', '-3'),
  ('x=-3', '-3'),
  ('(-3)', '-3'),
  ('between 5 and 1,234.', '1234'),
  ('3, 4, 5', '5'),
  ('18', '18'),
  ('0', '0'),
  ('-0', '0'),
  ('#### none, so 7', '7'),
  ('\\boxed{none} of 7', '7'),
  ('half: 2/4', '1/2'),
  ('2 / 4', '4'),
  ('1/0', None),
  ('', None),
  ('no idea', None),
  ('####', None),
  ('\\boxed{', None),
  ('\u0663', None),
  ('9' * 5000, None),
]

CHOICES = [
  ('B', 'B'),
  (' B\n', 'B'),
  ('(B)', 'B'),
  ('(b)', 'B'),
  ('B. because', 'B'),
  ('B) because', 'B'),
  ('A\nbecause', 'A'),
  ('A: a train', 'A'),
  ('The answer is B.', 'B'),
  ('The answer is (C), not (D).', 'C'),
  ('The answer is A because B is wrong.', 'A'),
  ('the answer is: **D**', 'D'),
  ('Answer: E', 'E'),
  ('Answer: (e)', 'E'),
  ('The answer is B. Wait, the answer is C.', 'C'),
  (r'\boxed{D}', 'D'),
  (r'So \boxed{\text{(D)}} and not A.', 'D'),
  (r'The answer is \boxed{C}', 'C'),
  (r'The answer is $\boxed{\text{C}}$', 'C'),
  ('I would choose C', 'C'),
  ('A train leaves, hence C', 'C'),
  ('C rather than (D)', 'D'),
  ('It is A', 'A'),
  ('A train leaves', None),
  ('A. Smith', 'A'),
  ('the answer is a train', None),
  ('F', None),
  ('DECADE', None),
  ("C's", None),
  ('b', None),
  ('', None),
]


@pytest.mark.parametrize(('text', 'expected'), NUMBERS)
def test_number(text, expected):
  assert extract('number', text) == expected


@pytest.mark.parametrize(('text', 'expected'), CHOICES)
def test_choice(text, expected):
  assert extract('choice', text) == expected


@pytest.mark.parametrize(
  ('text', 'expected'), [(' 18 \n', '18'), ('a \r\nb\r\n', 'a\nb'), ('a b', 'a b'), ('', None), (' \n', None)]
)
def test_exact(text, expected):
  assert extract('exact', text) == expected


@pytest.mark.parametrize(
  ('name', 'completion', 'reference', 'equal'),
  [
    ('number', 'The answer is $18.00.', 'eggs\n#### 18', True),
    ('number', 'The answer is 19.', 'eggs\n#### 18', False),
    ('number', 'no idea', '#### 18', False),
    ('number', '0.5', '1/2', True),
    ('choice', 'The answer is (b).', 'B', True),
    ('choice', 'The answer is (b).', '(C)', False),
    ('exact', ' 3142 ', '3142', True),
    ('exact', '3142.', '3142', False),
    ('exact', '', '3142', False),
  ],
)
def test_equality(name, completion, reference, equal):
  assert is_equal(name, completion, reference) is equal


def test_a_text_equals_itself_by_every_extractor():
  assert all(is_equal(name, 'C 18', 'C 18') for name in EXTRACTORS)


def test_mistakes_are_told():
  with pytest.raises(ValueError, match="extractor must be one of exact, number, choice, got 'float'"):
    extract('float', '1')
  with pytest.raises(ValueError, match="answer must hold what the extractor number looks for, got 'many'"):
    is_equal('number', '5', 'many')
