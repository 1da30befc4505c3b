"""The networks of the paper's Table 1, extractor and header apart, and a registry for your own.

An extractor maps images `[batch, height, width, channels]` to representations `[batch,
feature_size]`; a header maps representations to class scores. The five CNNs are conv 5x5 → max-pool
2x2, twice, then FC1 and FC2, all with ReLU; the representation is FC2's output after ReLU, and the
header is FC3.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from pfedafm_jax.errors import PfedafmError
from pfedafm_jax.extractors import MobileNetSmall, ResNetSmall
from pfedafm_jax.initialisers import initialisers
from pfedafm_jax.kernels import conv_pool
from pfedafm_jax.settings import bad, known

Params = Any  # a pytree of arrays
FEATURE_SIZE = 500


# ------------------------------------------------------------------------------------------- layers


class Convolution(nn.Module):
    """Kernel `(5, 5, in, out)` and bias of a layer of convolution, ReLU and pooling."""

    features: int
    initialisation: str = "torch"

    @nn.compact
    def __call__(self, channels: int) -> tuple[jax.Array, jax.Array]:
        init = initialisers(self.initialisation, 25 * channels)
        kernel = self.param("kernel", init["kernel_init"], (5, 5, channels, self.features))
        return kernel, self.param("bias", init["bias_init"], (self.features,))


def linear(width: int, inputs: jax.Array, initialisation: str, name: str) -> jax.Array:
    """A dense layer of the enclosing module, with the chosen initialisation."""
    return nn.Dense(width, **initialisers(initialisation, inputs.shape[-1]), name=name)(inputs)


class CNN(nn.Module):
    """An extractor of Table 1: everything but FC3."""

    conv2: int
    fc1: int
    features: int = FEATURE_SIZE
    initialisation: str = "torch"

    @nn.compact
    def __call__(self, images):
        conv1 = Convolution(16, self.initialisation, name="conv1")(images.shape[-1])
        conv2 = Convolution(self.conv2, self.initialisation, name="conv2")(16)
        hidden = conv_pool(conv_pool(images, *conv1), *conv2)
        hidden = hidden.reshape(hidden.shape[0], -1)
        hidden = nn.relu(linear(self.fc1, hidden, self.initialisation, "fc1"))
        return nn.relu(linear(self.features, hidden, self.initialisation, "fc2"))

    # A family, see `families.py`.

    @staticmethod
    def widest(modules: Sequence["CNN"]) -> "CNN":
        """A network that holds all of these."""
        conv2, fc1 = (max(getattr(one, name) for one in modules) for name in ("conv2", "fc1"))
        return modules[0].clone(conv2=conv2, fc1=fc1)

    def unfold(self, params: Params) -> Params:
        """FC1's inputs, which are pixels times channels, as two axes."""
        kernel = params["fc1"]["kernel"]
        kernel = kernel.reshape(-1, self.conv2, kernel.shape[-1])
        return {**params, "fc1": {**params["fc1"], "kernel": kernel}}

    def fold(self, params: Params) -> Params:
        """`unfold` undone."""
        kernel = params["fc1"]["kernel"]
        kernel = kernel.reshape(-1, kernel.shape[-1])
        return {**params, "fc1": {**params["fc1"], "kernel": kernel}}


class WithLinear(nn.Module):
    """An extractor of any width and the linear layer that the paper adds to bring it to ours."""

    extractor: nn.Module
    features: int = FEATURE_SIZE
    initialisation: str = "torch"

    @nn.compact
    def __call__(self, images):
        features = checked_features(self.extractor(images))
        if features.shape[-1] == self.features:
            return features
        return linear(self.features, features, self.initialisation, "match")


def checked_features(output: Any) -> Any:
    """An extractor's output, if it is what others can build on: floats `[batch, width]`."""
    if not hasattr(output, "dtype"):
        raise PfedafmError(f"gives {type(output).__name__}, expected one array [batch, width]")
    if not jnp.issubdtype(output.dtype, jnp.floating):
        raise PfedafmError(f"gives {output.dtype}, expected floats")
    return output


# ----------------------------------------------------------------------------------------- registry

_EXTRACTORS: dict[str, Callable[..., nn.Module]] = {
    "cnn1": lambda **options: CNN(conv2=32, fc1=2000, **options),
    "cnn2": lambda **options: CNN(conv2=16, fc1=2000, **options),
    "cnn3": lambda **options: CNN(conv2=32, fc1=1000, **options),
    "cnn4": lambda **options: CNN(conv2=32, fc1=800, **options),
    "cnn5": lambda **options: CNN(conv2=32, fc1=500, **options),
}


def register_extractor(name: str, extractor: nn.Module) -> None:
    """Makes a Flax module usable as an architecture under `name`: images in, `[batch, width]` out.

    A module with a field `features` gets its last layer set to the wanted width; any other gets a
    linear layer added where its width differs. A field `initialisation` is set to that of the run.
    Modules that carry batch statistics are refused: use GroupNorm or LayerNorm.

    >>> class Flat(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, images):
    ...         return images.reshape(images.shape[0], -1)
    >>> register_extractor("flat", Flat())
    >>> flat = describe("flat", num_classes=10, image_shape=(4, 4, 3))
    >>> flat.extractor_params  # the linear layer from 48 to 500
    24500
    """
    if not name.isidentifier():
        raise PfedafmError(f"extractor name {name!r}: use letters, digits and underscores")
    if not isinstance(extractor, nn.Module):
        accepted = "a Flax module, made: MyModule()"
        raise PfedafmError(f"extractor {name!r} is {extractor!r}; accepted: {accepted}")

    def build(**options: Any) -> nn.Module:
        fields = getattr(extractor, "__dataclass_fields__", {})
        known = extractor.clone(**{name: options[name] for name in options if name in fields})
        return known if "features" in fields else WithLinear(known, **options)

    _EXTRACTORS[name] = build
    describe.cache_clear()


def extractor_names() -> list[str]:
    """The registered architectures."""
    return list(_EXTRACTORS)


@dataclass(frozen=True)
class Architecture:
    """One network: how to build it, how large it is, what it costs."""

    name: str
    extractor: nn.Module
    header: nn.Module
    image_shape: tuple[int, int, int]
    feature_size: int
    num_classes: int
    extractor_params: int
    header_params: int
    extractor_macs: int  # multiply-adds of the paper's layers for one image, forward
    header_macs: int

    def extract(self, params: Params, images: jax.Array) -> jax.Array:
        return self.extractor.apply({"params": params}, images)  # pyright: ignore[reportReturnType]

    def classify(self, params: Params, features: jax.Array) -> jax.Array:
        return self.header.apply({"params": params}, features)  # pyright: ignore[reportReturnType]

    def init_extractor(self, key: jax.Array) -> Params:
        return self.extractor.init(key, jnp.zeros((1, *self.image_shape)))["params"]

    def init_header(self, key: jax.Array) -> Params:
        return self.header.init(key, jnp.zeros((1, self.feature_size)))["params"]

    @property
    def activations(self) -> int:
        """Numbers into and out of all products that one image goes through: what a gradient needs."""
        params = jax.eval_shape(self.init_extractor, jax.random.key(0))

        def count(batch: int) -> int:
            images = jax.ShapeDtypeStruct((batch, *self.image_shape), jnp.float32)
            return _in_products(jax.make_jaxpr(self.extract)(params, images).jaxpr)

        return count(2) - count(1)

    @property
    def params(self) -> int:
        """Parameters of extractor and header."""
        return self.extractor_params + self.header_params

    @property
    def macs(self) -> int:
        """Multiply-adds of one image through extractor and header."""
        return self.extractor_macs + self.header_macs


def _count(tree: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def _in_products(jaxpr: Any) -> int:
    """Numbers into and out of the products and convolutions of a traced function."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("dot_general", "conv_general_dilated"):
            total += sum(one.aval.size for one in (*equation.invars, *equation.outvars))
        inner = [
            getattr(one, "jaxpr", one) for one in jax.tree.leaves(list(equation.params.values()))
        ]
        total += sum(_in_products(one) for one in inner if hasattr(one, "eqns"))
    return total


def _extractor_macs(extractor: nn.Module, params: Params, images: jax.ShapeDtypeStruct) -> int:
    """Multiply-adds of the algorithm's layers: by formula for the paper's CNNs, else XLA's count."""
    if isinstance(extractor, CNN):
        macs, (height, width) = 0, images.shape[1:3]
        for layer in ("conv1", "conv2"):
            macs += (height - 4) * (width - 4) * math.prod(params[layer]["kernel"].shape)
            height, width = (height - 4) // 2, (width - 4) // 2
        return macs + sum(math.prod(params[layer]["kernel"].shape) for layer in ("fc1", "fc2"))
    program = jax.jit(lambda params, images: extractor.apply({"params": params}, images))
    return int((program.lower(params, images).cost_analysis() or {}).get("flops", 0)) // 2


@lru_cache(maxsize=256)
def describe(
    name: str,
    num_classes: int,
    image_shape: tuple[int, int, int] = (32, 32, 3),
    feature_size: int = FEATURE_SIZE,
    initialisation: str = "torch",
) -> Architecture:
    """The architecture registered under `name`, checked and measured for images of this shape.

    >>> describe("cnn1", num_classes=10).params
    2621558
    """
    if name not in _EXTRACTORS:
        raise bad("architecture", name, known(name, _EXTRACTORS))
    extractor = _EXTRACTORS[name](features=feature_size, initialisation=initialisation)
    images = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
    try:
        variables = jax.eval_shape(extractor.init, jax.random.key(0), images)
        extra = sorted(set(variables) - {"params"})
        output: Any = None
        if not extra:
            output = checked_features(jax.eval_shape(extractor.apply, variables, images))
    except PfedafmError as error:
        raise PfedafmError(f"architecture {name!r} {error}") from None
    except Exception as error:  # a user's module may fail in any way; say which one and on what
        problem = f"does not accept images of shape {image_shape}: {error}"
        raise PfedafmError(f"architecture {name!r} {problem}") from error
    problem = ""
    if extra:
        problem = (
            f"carries state besides its parameters ({', '.join(extra)}), which cannot be averaged "
            "or kept per client here: use GroupNorm or LayerNorm instead of BatchNorm"
        )
    elif output.shape != (1, feature_size):
        problem = f"gives {output.shape} for one image, expected (1, {feature_size})"
    elif not jax.tree.leaves(variables):
        problem = "has no parameters, so there is nothing to train"
    if problem:
        raise PfedafmError(f"architecture {name!r} {problem}")
    header = nn.Dense(num_classes, **initialisers(initialisation, feature_size))
    return measured(name, extractor, header, image_shape, feature_size, num_classes)


def measured(
    name: str,
    extractor: nn.Module,
    header: nn.Module,
    image_shape: tuple[int, int, int],
    feature_size: int,
    num_classes: int,
) -> Architecture:
    """An architecture with its sizes and multiply-adds."""
    images = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
    params = jax.eval_shape(extractor.init, jax.random.key(0), images)["params"]
    return Architecture(
        name=name,
        extractor=extractor,
        header=header,
        image_shape=image_shape,
        feature_size=feature_size,
        num_classes=num_classes,
        extractor_params=_count(params),
        header_params=(feature_size + 1) * num_classes,
        extractor_macs=_extractor_macs(extractor, params, images),
        header_macs=feature_size * num_classes,
    )


register_extractor("resnet_small", ResNetSmall())
register_extractor("mobilenet_small", MobileNetSmall())
