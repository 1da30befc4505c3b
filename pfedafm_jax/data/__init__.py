"""Datasets, and which client has which samples.

`load` is the dataset of a configuration and its split, made of `dataset` and `partition/`; `sources/`
says where arrays come from, `arrays` and `images` what may be in them, and `augment` changes them in
training, on the device. Imports `base` and `config`.
"""

from pfedafm_jax.data.augment import augment, normalise
from pfedafm_jax.data.dataset import (
    DATASETS,
    NORMALISATION,
    Dataset,
    dataset_from_arrays,
    load_dataset,
)
from pfedafm_jax.data.partition.partition import Partition, make_partition
from pfedafm_jax.data.sources.leaf import token_ids
