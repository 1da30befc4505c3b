"""Datasets, their split over clients, and augmentation."""

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
