"""Models of other people: Flax modules, pure functions, and what a release says of them."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import linen, nnx

from dp_jax.errors import UserError
from dp_jax.files.code import described
from dp_jax.models.build import ModelSpec
from dp_jax.models.functional import Arrays, FunctionalModel, split

# The name of a model that was given as an object: nothing can rebuild it but who gave it.
GIVEN = "given as an object"
# The fact that holds the sha256 of the file of a model of other people.
CODE = "model_code_sha256"
# A Flax NNX module; a Linen module with its variables; or a pair of pure functions (init, apply).
ModelObject = nnx.Module | tuple[Any, Any]


@dataclasses.dataclass(frozen=True)
class PureModel:
  """A pure function of arrays, as `FunctionalModel` is of a module.

  Attributes:
    apply: (arrays by name, inputs, key or None) -> outputs.
    params: names of those that can be trained.
    random: empty: a key is given wherever there is one.
  """

  apply: Callable[[Arrays, Any, Any], Any]
  params: frozenset[str]
  random: tuple[str, ...] = ()

  def is_param(self, name: str) -> bool:
    """Whether an array can be trained."""
    return name in self.params

  def bind(self, arrays: Arrays, key: jax.Array | None = None) -> Callable[[Any], Any]:
    """The function of the inputs alone."""
    return lambda inputs: self.apply(arrays, inputs, key)


Structure = FunctionalModel | PureModel


def from_object(model: ModelObject, seed: int = 0) -> tuple[Structure, Arrays]:
  """Structure and initial arrays of a model that was given.

  Args:
    model: an `nnx.Module`; (a `linen.Module`, its variables), of which the collection "params" can
      be trained; or (init, apply), with `init(key) -> params`, any tree of arrays, and
      `apply(params, inputs)` or `apply(params, inputs, key)`, where key is None in predictions.
    seed: of `init`.

  Raises:
    ValueError: if it is none of these.
  """
  if isinstance(model, nnx.Module):
    return split(model)
  if not isinstance(model, tuple) or len(model) != 2:
    raise UserError(
      f"model={type(model).__name__} is not an nnx.Module, a pair (linen.Module, variables) or a"
      " pair of functions (init, apply)."
    )
  first, second = model
  if isinstance(first, linen.Module) and isinstance(second, Mapping):
    return _from_tree(second, _linen_apply(first), lambda name: name.startswith("params."))
  if callable(first) and callable(second):
    takes_key = len(inspect.signature(second).parameters) > 2
    apply = second if takes_key else (lambda params, inputs, key: second(params, inputs))
    return _from_tree(first(jax.random.key(seed, impl="threefry2x32")), apply, lambda name: True)
  raise UserError(
    f"model=({type(first).__name__}, {type(second).__name__}) is neither (linen.Module, variables)"
    " nor functions (init, apply)."
  )


def _linen_apply(module: linen.Module) -> Callable[[Any, Any, Any], Any]:
  def apply(variables: Any, inputs: Any, key: Any) -> Any:
    rngs = None if key is None else {"dropout": key}
    return module.apply(variables, inputs, rngs=rngs)

  return apply


def _from_tree(
  tree: Any, apply: Callable[[Any, Any, Any], Any], is_param: Callable[[str], bool]
) -> tuple[PureModel, Arrays]:
  leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
  names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
  if len(set(names)) < len(names) or not names:
    raise UserError(f"the arrays of the model need names of their own, not {', '.join(names)}.")

  def by_name(arrays: Arrays, inputs: Any, key: Any) -> Any:
    return apply(jax.tree.unflatten(structure, [arrays[name] for name in names]), inputs, key)

  arrays = {name: jax.numpy.asarray(leaf) for name, (_, leaf) in zip(names, leaves, strict=True)}
  return PureModel(by_name, frozenset(filter(is_param, names))), dict(sorted(arrays.items()))


def load_model(
  spec: ModelSpec, given: ModelObject | None = None, trust_code: bool = False, seed: int = 0
) -> tuple[Structure, Arrays]:
  """The structure that a description names, with initial arrays.

  Args:
    spec: the description.
    given: the model itself, where it is none of dp_jax.
    trust_code: import what the description names, which runs its code.
    seed: of initial arrays.

  Raises:
    ValueError: if it names code that is neither given nor trusted.
  """
  if given is not None:
    return from_object(given, seed)
  if spec.name == GIVEN:
    raise UserError("the model of this release was given as an object: give it again, as model=.")
  if ":" in spec.name and not trust_code:
    raise UserError(
      f"this release names the code {spec.name!r}: give the model (model=), or trust that code"
      " (trust_code=True, or --trust_code), which runs it."
    )
  if ":" in spec.name and described(spec.name, {})["sha256"] != spec.task.get(CODE, ""):
    raise UserError(f"the model {spec.name!r} is not the code that the release was made with.")
  model = spec.build(seed)
  if not isinstance(model, nnx.Module):
    raise UserError(
      f"model.name={spec.name!r} returned a {type(model).__name__}, not an nnx.Module."
    )
  return split(model)
