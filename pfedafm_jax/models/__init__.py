"""Networks: what maps a sample to class scores, as an extractor and a header.

`architecture` has the registry, sizes and costs; `cnn`, `resnet`, `mobilenet` and `mlp` are networks
and `flax_modules` takes one's own; `batch_stats`, `pretrained`, `init` and `padding` are about their
weights, `kernels/` is the native code under convolution and SGD. Imports `base`, `config`, `data`.
"""
