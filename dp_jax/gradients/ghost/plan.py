"""Chooses, for each parameter, how its norm and its clipped sum are computed."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence

from dp_jax.gradients.ghost import canonical, rules
from dp_jax.gradients.ghost.tokens import pairs_held
from dp_jax.gradients.ghost.uses import Use

# Primitives whose derivative in the parameter operand is known to be what the generic rule takes
# it for. Under engine "ghost" any other is refused; "auto" applies the generic rule to it too.
KNOWN = frozenset({
  "add", "add_any", "concatenate", "conv_general_dilated", "copy", "custom_jvp_call",
  "custom_vjp_call", "div", "dot_general", "dynamic_slice", "dynamic_update_slice", "gather",
  "max", "min", "mul", "neg", "pad", "pow", "scan", "select_n", "sub",
})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Group:
  """Uses whose gradients add up before the square, and the rule for them.

  Attributes:
    rule: "product", "convolution", "lookup" or "tied" (all never made whole), or "instantiate".
    roots: the parameters that the uses derive from.
    uses: their indices.
    how: for people: "outer product", "gram", "gradient", "gram of rows", ...
    flops: operations of the norm, a unit.
    numbers: entries that are instantiated, a unit: of gradients or Gram matrices.
  """

  rule: str
  roots: tuple[int, ...]
  uses: tuple[int, ...]
  how: str
  flops: int
  numbers: int


def make_plan(uses: Sequence[Use], sizes: Sequence[int]) -> list[Group]:
  """Groups uses and chooses a rule for each group.

  Args:
    uses: in the order of the evaluation.
    sizes: entries of each parameter.

  Returns:
    Groups such that each use is in exactly one, and no parameter's gradient is split between two
    of them except by disjoint slices.
  """
  groups: list[Group] = []
  for roots, members in _components(uses):
    groups += _of_component(uses, roots, members, sizes)
  return groups


def _components(uses: Sequence[Use]) -> list[tuple[tuple[int, ...], list[int]]]:
  """Parameters that some use has in common, with their uses."""
  parent: dict[int, int] = {}

  def find(x: int) -> int:
    parent.setdefault(x, x)
    while parent[x] != x:
      x = parent[x]
    return x

  for use in uses:
    roots = sorted({root for _, origin in use.weights for root in origin.roots})
    for root in roots:
      parent[find(root)] = find(roots[0])
  members: dict[int, list[int]] = defaultdict(list)
  for index, use in enumerate(uses):
    members[find(min(use.weights[0][1].roots))].append(index)
  return [
    (tuple(sorted(r for r in parent if find(r) == top)), found) for top, found in members.items()
  ]


def _of_component(
  uses: Sequence[Use], roots: tuple[int, ...], members: list[int], sizes: Sequence[int]
) -> list[Group]:
  origins = [origin for i in members for _, origin in uses[i].weights]
  simple = len(roots) == 1 and all(o.structural for o in origins)
  simple = simple and all(len(uses[i].weights) == 1 for i in members)
  slices = {o.index for o in origins}
  if simple and (None not in slices or len(slices) == 1):
    by_slice: dict[int | None, list[int]] = defaultdict(list)
    for i in members:
      by_slice[uses[i].weights[0][1].index].append(i)
    found = [_rule(uses, roots, part) for part in by_slice.values()]
    if all(group is not None for group in found):
      return _merge_instantiated([group for group in found if group is not None], roots, sizes)
  numbers = sum(sizes[root] for root in roots)
  return [Group("instantiate", roots, tuple(members), "gradient", 2 * numbers, numbers)]


def _merge_instantiated(
  groups: list[Group], roots: tuple[int, ...], sizes: Sequence[int]
) -> list[Group]:
  """Slices that are instantiated share one gradient, which is that of the whole parameter."""
  made = [group for group in groups if group.rule == "instantiate"]
  if not made:
    return groups
  uses = tuple(use for group in made for use in group.uses)
  numbers = sum(sizes[root] for root in roots)
  merged = Group("instantiate", roots, uses, "gradient", 2 * numbers, numbers)
  return [*(group for group in groups if group.rule != "instantiate"), merged]


def _rule(uses: Sequence[Use], roots: tuple[int, ...], members: list[int]) -> Group | None:
  """The rule for uses of one rearranged parameter (or of one slice of it)."""
  chosen = [uses[i] for i in members]
  layouts = {_layout(use) for use in chosen if canonical.is_dot(use)}
  alike = len(chosen) == 1 or (len(layouts) == 1 and None not in layouts)
  if all(canonical.is_dot(use) for use in chosen) and alike:
    return _product(roots, members, chosen)
  if len(chosen) == 1 and canonical.is_convolution(chosen[0]):
    return _convolution(roots, members, chosen[0])
  lookups = [u for u in chosen if canonical.is_lookup(u)]
  if len(lookups) == 1 and len(chosen) == 1:
    tokens, width = _lookup_sizes(lookups[0])
    flops = 2 * tokens * tokens * width
    numbers = 2 * pairs_held(tokens, tokens)
    return Group("lookup", roots, tuple(members), "gram of rows", flops, numbers)
  products = [u for u in chosen if canonical.is_dot(u)]
  if len(lookups) == 1 and len(lookups) + len(products) == len(chosen):
    return _tied(roots, members, lookups[0], products)
  if len(chosen) == 1:
    size = math.prod(chosen[0].eqn.invars[chosen[0].weights[0][0]].aval.shape)
    return Group("instantiate", roots, tuple(members), "gradient", 2 * size, size)
  return None


def _layout(use: Use) -> tuple[tuple[int | None, ...], ...] | None:
  """Which axes of the parameter a product contracts and keeps; None where that is not known."""
  axes = use.weights[0][1].axes
  if axes is None:
    return None
  return tuple(tuple(axes[i] for i in role) for role in canonical.dot_roles(use))


def _product(roots: tuple[int, ...], members: list[int], chosen: list[Use]) -> Group:
  sizes = [_dot_sizes(use) for use in chosen]
  blocks, _, inputs, outputs = sizes[0]
  total = (blocks, sum(s[1] for s in sizes), inputs, outputs)
  return _contraction_group("product", roots, members, total)


def by_pixels(use: Use) -> bool:
  """Whether the Gram matrix of a convolution's patches is cheaper by that of its pixels."""
  _, tokens, inputs, _ = canonical.conv_sizes(use)
  return _pixel_gram(use) <= tokens * tokens * inputs


def _pixel_gram(use: Use) -> int:
  """Multiplications and additions of one group: every two pixels, then every two patches."""
  _, tokens, inputs, _ = canonical.conv_sizes(use)
  kernel = canonical.kernel_size(use)
  return canonical.conv_pixels(use) ** 2 * (inputs // kernel) + tokens * tokens * kernel


def _convolution(roots: tuple[int, ...], members: list[int], use: Use) -> Group:
  sizes = canonical.conv_sizes(use)
  _, tokens, inputs, outputs = sizes
  gram = min(_pixel_gram(use), tokens * tokens * inputs) + tokens * tokens * outputs
  held = canonical.conv_pixels(use) ** 2 + tokens * tokens if by_pixels(use) else None
  return _contraction_group("convolution", roots, members, sizes, gram, held)


def _contraction_group(
  rule: str,
  roots: tuple[int, ...],
  members: list[int],
  sizes: tuple[int, int, int, int],
  gram: int | None = None,
  held: int | None = None,
) -> Group:
  blocks, tokens, inputs, outputs = sizes
  gram = tokens * tokens * (inputs + outputs) if gram is None else gram
  if tokens == 1:
    how, flops = "outer product", rules.flops("outer product", sizes)
  elif gram <= tokens * inputs * outputs:
    how, flops = "gram", 2 * blocks * gram
  else:
    how, flops = "gradient", rules.flops("gradient", sizes)
  numbers = {"gram": held or 2 * tokens * tokens, "gradient": inputs * outputs}.get(how, 0)
  return Group(rule, roots, tuple(members), how, flops, blocks * numbers)


def _tied(
  roots: tuple[int, ...], members: list[int], lookup: Use, products: list[Use]
) -> Group | None:
  """A table that is looked up and multiplied with, the product giving one output a row."""
  wanted = ((), (1,), (0,))
  direct = lookup.weights[0][1].axes == (0, 1)
  if not direct or len(products) != 1 or _layout(products[0]) != wanted:
    return None
  sizes = _dot_sizes(products[0])
  tokens = sizes[1]
  lookups, width = _lookup_sizes(lookup)
  flops = 2 * (lookups * lookups * width + tokens * lookups * width)
  gram = rules.gram_is_cheaper(*sizes)
  flops += rules.flops("gram" if gram else "gradient", sizes)
  numbers = 2 * tokens * tokens if gram else sizes[2] * sizes[3]
  numbers += 2 * pairs_held(lookups, lookups) + 2 * pairs_held(tokens, lookups)
  return Group("tied", roots, tuple(members), "gram, both terms and cross term", flops, numbers)


def _dot_sizes(use: Use) -> tuple[int, int, int, int]:
  side = use.weights[0][0]
  weight, data = use.eqn.invars[side].aval.shape, use.eqn.invars[1 - side].aval.shape
  batch, contracted, free = canonical.dot_roles(use)
  blocks = math.prod(weight[i] for i in batch)
  inputs = math.prod(weight[i] for i in contracted)
  used = use.eqn.params["dimension_numbers"]
  taken = {*used[0][1 - side], *used[1][1 - side]}
  tokens = math.prod(size for i, size in enumerate(data) if i not in taken)
  return blocks, tokens, inputs, math.prod(weight[i] for i in free)


def _lookup_sizes(use: Use) -> tuple[int, int]:
  """(lookups, width of a row)."""
  return math.prod(use.eqn.invars[1].aval.shape), use.eqn.invars[0].aval.shape[1]
