"""Ghost clipping of any JAX function: the clipped sum without per-unit gradients.

The loss of one unit is traced to a jaxpr. Where a value that comes from parameters alone meets one
that depends on the unit, a zero *tap* is added to the result; the gradient in the taps gives every
cotangent in one backward pass, and from cotangents and operands follow norms and clipped sum.

  interpreter.py  follows which values come from parameters, and finds each meeting
  structure.py    the primitives that have a rule, with the parameters that it knows
  uses.py         a meeting (a Use), and who is told of it
  traced.py       the loss of one unit with all its uses
  plan.py         chooses a rule for each parameter, from its uses
  rules.py        the rules: squared norms, and clipped sums, of one kind of use
  tokens.py       pairs of tokens of a unit, a part at a time
  batch.py        norms and gradients of a batch after its backward pass
  sums.py         the clipped sum of every parameter
  products.py     that of matrix products and convolutions, few units at a time
  rounding.py     how many units those are: what float32 additions round, and its bound
  lookups.py      that of looked-up rows, in whole numbers
  engine.py       puts them together
  explain.py      the choices as a table

Goodfellow 2015, arXiv:1510.01799 (outer products); Li et al. 2021, arXiv:2110.05679 (Gram
matrices); Bu et al. 2022, arXiv:2205.10683 (mixed); here for any function, by its jaxpr.
"""
