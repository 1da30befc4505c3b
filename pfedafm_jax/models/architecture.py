"""Architectures: an extractor and a header, with their sizes and costs, and a registry for your own.

An extractor maps images `[batch, height, width, channels]` to representations `[batch,
feature_size]`; a header maps representations to class scores.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from pfedafm_jax.base.errors import PfedafmError, bad, known
from pfedafm_jax.base.trees import num_values
from pfedafm_jax.models import flax_modules
from pfedafm_jax.models import pretrained as weights
from pfedafm_jax.models.batch_stats import statistics_of, without_statistics
from pfedafm_jax.models.cnn import CNN, FEATURE_SIZE, Params, linear
from pfedafm_jax.models.init import initialisers
from pfedafm_jax.models.kernels.layers import fast_layers
from pfedafm_jax.models.mlp import MLP
from pfedafm_jax.models.mobilenet import MobileNetSmall
from pfedafm_jax.models.resnet import ResNet

# ------------------------------------------------------------------------------------------- layers


class WithLinear(nn.Module):
    """An extractor of any width, with the paper's linear layer to `feature_size`."""

    extractor: nn.Module
    features: int = FEATURE_SIZE
    initialisation: str = "torch"

    @nn.compact
    def __call__(self, images):
        features = flax_modules.checked_features(self.extractor(images))
        if features.shape[-1] == self.features:
            return features
        return linear(self.features, features, self.initialisation, "match")


# ----------------------------------------------------------------------------------------- registry


_EXTRACTORS: dict[str, Callable[..., nn.Module]] = {
    "cnn1": lambda **options: CNN(conv2=32, fc1=2000, **options),
    "cnn2": lambda **options: CNN(conv2=16, fc1=2000, **options),
    "cnn3": lambda **options: CNN(conv2=32, fc1=1000, **options),
    "cnn4": lambda **options: CNN(conv2=32, fc1=800, **options),
    "cnn5": lambda **options: CNN(conv2=32, fc1=500, **options),
}
_PRETRAINED: dict[str, str] = {}  # digests of the weights that extractors start from, by name


def register_extractor(
    name: str,
    extractor: nn.Module | Callable[..., nnx.Module],
    pretrained: str | Path | Params | None = None,
) -> None:
    """Makes a Flax module usable as an architecture under `name`: images in, `[batch, width]` out.

    A field `features` of the module is set to the required width; a module without it gets a linear
    layer if its width differs. A field `initialisation` is set to that of the run.

    Args:
        extractor: a Linen module; or of NNX a class, or a function that makes the module, which is
            called with `rngs`. BatchNorm and Dropout train while the network is trained, and only
            then.
        pretrained: the weights it starts from: a `.safetensors` file or a tree, with a name and a
            shape for each of the module's parameters and statistics; by default random ones.

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
    made = isinstance(extractor, nn.Module | nnx.Module)
    of_class = isinstance(extractor, type) and not issubclass(extractor, nnx.Module)
    if isinstance(extractor, nnx.Module) or not (made or callable(extractor)) or of_class:
        accepted = "a Flax module: of Linen made, MyModule(); of NNX a class or a function of rngs"
        raise PfedafmError(f"extractor {name!r} is {extractor!r}; accepted: {accepted}")
    module = extractor if isinstance(extractor, nn.Module) else flax_modules.FromNNX(extractor)

    def build(**options: Any) -> nn.Module:
        fields = getattr(module, "__dataclass_fields__", {})
        known = module.clone(**{name: options[name] for name in options if name in fields})
        return known if "features" in fields else WithLinear(known, **options)

    _PRETRAINED[name] = "" if pretrained is None else weights.keep(pretrained)
    _EXTRACTORS[name] = build
    describe.cache_clear()


def extractor_names() -> list[str]:
    """The registered architectures."""
    return list(_EXTRACTORS)


@dataclass(frozen=True)
class Architecture:
    """A network with its sizes and costs."""

    name: str
    extractor: nn.Module
    header: nn.Module
    image_shape: tuple[int, ...]
    feature_size: int
    num_classes: int
    dtype: str = "uint8"  # of the data: uint8 pixels, float32 features, int32 token ids
    pretrained: str = ""  # digest of the weights it starts from

    def stored(self, count: Any) -> jax.ShapeDtypeStruct:
        """So many samples as a dataset holds them; `count` may be symbolic."""
        return jax.ShapeDtypeStruct((count, *self.image_shape), jnp.dtype(self.dtype))

    def inputs(self, count: int) -> jax.ShapeDtypeStruct:
        """So many samples as the network gets them: floats, but for token ids."""
        kind = jnp.int32 if self.dtype == "int32" else jnp.float32
        return jax.ShapeDtypeStruct((count, *self.image_shape), kind)

    def extract(self, params: Params, images: jax.Array) -> jax.Array:
        with fast_layers():
            return flax_modules.run(self.extractor, params, images, self.random)

    def classify(self, params: Params, features: jax.Array) -> jax.Array:
        return self.header.apply({"params": params}, features)  # pyright: ignore[reportReturnType]

    def init_extractor(self, key: jax.Array) -> Params:
        example = jnp.zeros((1, *self.image_shape), self.inputs(1).dtype)
        variables = flax_modules.init(self.extractor, key, example)
        if self.pretrained:
            inside = "extractor" if isinstance(self.extractor, WithLinear) else None
            variables = weights.placed(self.pretrained, variables, inside)
        return flax_modules.joined(variables)

    def init_header(self, key: jax.Array) -> Params:
        return self.header.init(key, jnp.zeros((1, self.feature_size)))["params"]

    @cached_property
    def _shapes(self) -> Params:
        """Shapes of the extractor's parameters and statistics."""
        start = partial(flax_modules.init, self.extractor)
        return flax_modules.joined(jax.eval_shape(start, jax.random.key(0), self.inputs(1)))

    @cached_property
    def extractor_params(self) -> int:
        """Parameters of the extractor."""
        return num_values(without_statistics(self._shapes))

    @cached_property
    def statistics(self) -> int:
        """Numbers of BatchNorm and the like, beside the parameters."""
        return num_values(statistics_of(self._shapes))

    @cached_property
    def random(self) -> bool:
        """Whether it needs a key in training, as dropout does."""
        return flax_modules.is_random(self.extractor, self._shapes, self.inputs(1))

    @cached_property
    def extractor_macs(self) -> int:
        """Multiply-adds for one image, forward: by formula for the paper's CNNs, else XLA's count."""
        if isinstance(self.extractor, CNN):
            macs, (height, width) = 0, self.image_shape[:2]
            size = {name: math.prod(layer["kernel"].shape) for name, layer in self._shapes.items()}
            for layer in ("conv1", "conv2"):
                macs += (height - 4) * (width - 4) * size[layer]
                height, width = (height - 4) // 2, (width - 4) // 2
            return macs + size["fc1"] + size["fc2"]
        program = jax.jit(partial(flax_modules.run, self.extractor, random=False))
        lowered = program.lower(self._shapes, self.inputs(1))
        return int((lowered.cost_analysis() or {}).get("flops", 0)) // 2

    @property
    def header_params(self) -> int:
        """Parameters of the header."""
        return (self.feature_size + 1) * self.num_classes

    @property
    def header_macs(self) -> int:
        """Multiply-adds of the header for one image."""
        return self.feature_size * self.num_classes

    @property
    def params(self) -> int:
        """Parameters of extractor and header."""
        return self.extractor_params + self.header_params

    @property
    def macs(self) -> int:
        """Multiply-adds of one image through extractor and header."""
        return self.extractor_macs + self.header_macs

    @cached_property
    def activations(self) -> int:
        """Inputs and outputs of all products for one image, in numbers: what a gradient keeps."""

        def count(batch: int) -> int:
            return _in_products(
                jax.make_jaxpr(self.extract)(self._shapes, self.inputs(batch)).jaxpr
            )

        return count(2) - count(1)


def _in_products(jaxpr: Any) -> int:
    """Count of inputs and outputs of the products and convolutions in a traced function."""
    total = 0
    for equation in jaxpr.eqns:
        native = str(equation.params.get("target_name")).endswith("_Conv")
        if native or equation.primitive.name in ("dot_general", "conv_general_dilated"):
            total += sum(one.aval.size for one in (*equation.invars, *equation.outvars))
        inner = [
            getattr(one, "jaxpr", one) for one in jax.tree.leaves(list(equation.params.values()))
        ]
        total += sum(_in_products(one) for one in inner if hasattr(one, "eqns"))
    return total


@lru_cache(maxsize=256)
def describe(
    name: str,
    num_classes: int,
    image_shape: tuple[int, ...] = (32, 32, 3),
    feature_size: int = FEATURE_SIZE,
    initialisation: str = "torch",
    dtype: str = "uint8",
) -> Architecture:
    """The architecture registered under `name`, checked for data of this shape and type: uint8
    pixels, float32 features or int32 token ids.

    >>> describe("cnn1", num_classes=10).params
    2621558
    """
    if name not in _EXTRACTORS:
        raise bad("architecture", name, known(name, _EXTRACTORS))
    extractor = _EXTRACTORS[name](features=feature_size, initialisation=initialisation)
    header = nn.Dense(num_classes, **initialisers(initialisation, feature_size))
    about = image_shape, feature_size, num_classes, dtype, _PRETRAINED.get(name, "")
    found = Architecture(name, extractor, header, *about)
    try:
        flax_modules.check(extractor, found.inputs(1), feature_size)
        _ = found.random  # raises if it cannot be trained
        jax.eval_shape(found.init_extractor, jax.random.key(0))  # with its pretrained weights
        return found
    except PfedafmError as error:
        raise PfedafmError(f"architecture {name!r} {error}") from None
    except Exception as error:  # a user's module may raise anything; say which one and on what
        what = "images" if dtype == "uint8" else f"{dtype} data"
        problem = f"does not accept {what} of shape {image_shape}: {error}"
        raise PfedafmError(f"architecture {name!r} {problem}") from error


register_extractor("resnet_small", ResNet())
register_extractor("mobilenet_small", MobileNetSmall())
register_extractor("mlp", MLP(hidden=200))
register_extractor("mlp_small", MLP(hidden=50))
register_extractor("resnet18", ResNet(widths=(64, 128, 256, 512), blocks=2))
