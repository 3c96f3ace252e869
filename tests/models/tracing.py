"""What the tests of all models ask: shapes without computing, and properties at tiny sizes."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dp_jax.models.functional import partition, split
from dp_jax.models.inspect import check_model

# Compiling takes longer than running at these sizes.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
IMAGENET = {"input_shape": (224, 224, 3), "num_classes": 1000}


def rngs():
  return nnx.Rngs(0)


def num_parameters(build):
  """The number of parameters of the module that `build` returns, without computing them."""
  model = nnx.eval_shape(build)
  return sum(math.prod(x.shape) for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


def traced(build, *inputs):
  """The jaxpr of a forward pass on inputs of these (shape, dtype), without computing."""
  functional, arrays = split(nnx.eval_shape(build))
  structs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in inputs]
  return jax.make_jaxpr(lambda a, *x: functional.bind(a)(*x))(arrays, *structs)


def products(jaxpr):
  """The matrix products and convolutions of a forward pass, as equations in order."""
  names = ("dot_general", "conv_general_dilated")
  return [equation for equation in jaxpr.eqns if equation.primitive.name in names]


def check_shapes(build, shape, *inputs):
  """Asserts logits float32[shape] at either compute dtype.

  Args:
    build: gives the module that computes in a dtype.
    shape: of the logits.
    *inputs: (shape, dtype) of each input.
  """
  for dtype in ("float32", "bfloat16"):
    jaxpr = traced(lambda dtype=dtype: build(dtype), *inputs)
    assert [(x.shape, x.dtype) for x in jaxpr.out_avals] == [(shape, jnp.float32)]
    parameters = jaxpr.in_avals[: -len(inputs)]
    assert {x.dtype for x in parameters} == {jnp.dtype(jnp.float32)}
    operands = {v.aval.dtype for equation in products(jaxpr) for v in equation.invars}
    assert operands == {jnp.dtype(dtype)}


def filled(build, seed=0):
  """Structure and arrays of a tiny model, at random values that leave no parameter at 0 or 1.

  The values come from numpy: initialising a module would compile a program for each shape.
  """
  functional, arrays = split(nnx.eval_shape(build))
  random = np.random.default_rng(seed)
  values = {}
  for name, x in arrays.items():
    noise = random.standard_normal(x.shape).astype(np.float32)
    if x.ndim > 1:
      values[name] = noise / np.float32(math.prod(x.shape[:-1]) ** 0.5)
    else:
      values[name] = np.float32(name.endswith(("scale", "gain"))) + np.float32(0.2) * noise
  return functional, values


def forward(functional):
  """The compiled function (arrays, *inputs) -> outputs of a structure."""
  return jax.jit(lambda arrays, *inputs: functional.bind(arrays)(*inputs), compiler_options=QUICK)


def check_units(build, inputs, other, trainable=".*"):
  """Asserts that examples are independent and that every trained parameter has a gradient.

  Args:
    build: gives a module of a tiny size.
    inputs: two examples [2, ...].
    other: one example, put in the place of the second.
    trainable: which parameters are trained.
  """
  functional, arrays = filled(build)
  check_model(functional, arrays, lambda module: module(inputs[:1]))
  params, frozen = partition(functional, arrays, trainable)

  @functools.partial(jax.jit, compiler_options=QUICK)
  def gradients_and_outputs(x):
    def loss(p):
      outputs = functional.bind({**p, **frozen})(x)
      # Weights that differ: the sum of all outputs may be a constant of a norm.
      weights = np.sin(np.arange(outputs.size, dtype=np.float32)).reshape(outputs.shape)
      return jnp.sum(outputs * weights), outputs

    return jax.grad(loss, has_aux=True)(params)

  gradients, outputs = gradients_and_outputs(inputs)
  _, changed = gradients_and_outputs(np.stack([inputs[0], other]))
  np.testing.assert_array_equal(changed[0], outputs[0])
  assert np.abs(np.subtract(changed[1], outputs[1])).max() > 1e-4
  assert gradients.keys() == params.keys()
  for name, gradient in gradients.items():
    assert np.isfinite(gradient).all(), name
    assert np.abs(gradient).max() > 1e-5, name


def images(*shape):
  """Random images float32[*shape]."""
  return np.random.default_rng(1).standard_normal(shape).astype(np.float32)
