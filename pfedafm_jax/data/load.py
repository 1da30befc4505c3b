"""The data of a configuration: its dataset, and the clients' shares of it."""

from dataclasses import replace

from pfedafm_jax.base.errors import PfedafmError, bad, known
from pfedafm_jax.base.files import Log
from pfedafm_jax.config.config import Config
from pfedafm_jax.data import Dataset, Partition, load_dataset, make_partition
from pfedafm_jax.data.dataset import check_name
from pfedafm_jax.data.partition.partition import PARTITIONS


def check_data(config: Config, dataset: Dataset | None = None) -> None:
    """Raises `PfedafmError` for the first setting that says what is no dataset or partition.

    If `dataset` is given, its name may be anything, and its classes and channels are checked.
    """
    if dataset is None:
        check_name(config.dataset)
    if config.image_size and not config.dataset.startswith(("folder:", "leaf:", "tfds:")):
        accepted = f"0 for {config.dataset}, where all have one size; N for folder:, leaf:, tfds:"
        raise bad("image_size", config.image_size, accepted)
    if config.partition not in PARTITIONS and not config.partition.endswith(".npz"):
        accepted = f"{known(config.partition, PARTITIONS)}, or a file, NAME.npz"
        raise bad("partition", config.partition, accepted)
    named = {"cifar10": 10, "cifar100": 100, "synthetic": config.synthetic_classes}
    classes = named.get(config.dataset) if dataset is None else dataset.num_classes
    if classes == 1:
        raise bad("dataset", config.dataset, "two or more classes; this has one class only")
    if classes and config.partition == "pathological" and config.classes_per_client > classes:
        accepted = f"1 to {classes}, the classes of {config.dataset}"
        raise bad("classes_per_client", config.classes_per_client, accepted)
    if dataset is not None:
        _check_images(config, dataset)


def _check_images(config: Config, dataset: Dataset) -> None:
    """Raises on settings for images that the data are not."""
    channels, pixels = dataset.image_shape[-1], dataset.dtype == "uint8"
    if config.normalisation == "imagenet" and not (channels == 3 and pixels):
        found = f"images that have {channels} and not 3 channels" if pixels else dataset.dtype
        raise bad("normalisation", "imagenet", f"dataset, for {found}")
    for name in ("flip", "erase", "crop"):
        if getattr(config, name) and dataset.noun != "images":
            found = f"{dataset.dtype} {list(dataset.image_shape)}"
            raise bad(name, True, f"false, for data that are no images but {found}")


def load_data(config: Config, data_dir: str | None = None, log: Log | None = None) -> Dataset:
    """The dataset of a configuration; `data_dir` has CIFAR, `log` is called about downloads."""
    return load_dataset(
        config.dataset,
        data_dir,
        num_classes=config.synthetic_classes,
        num_samples=config.synthetic_samples,
        seed=config.seed,
        image_size=config.image_size,
        log=log,
    )


def split(config: Config, dataset: Dataset) -> Partition:
    """The clients' shares of a dataset; raises `PfedafmError` if it is too small."""
    return _shares(config, dataset).of(slice(config.num_clients))


def held_out(config: Config, dataset: Dataset) -> Partition:
    """The shares of the `held_out_clients` clients, which never take part."""
    return _shares(config, dataset).of(slice(config.num_clients, None))


def _shares(config: Config, dataset: Dataset) -> Partition:
    check_data(config, dataset)
    own, held_out = config.num_clients, config.held_out_clients
    try:
        return _among(config, dataset, own + held_out)
    except PfedafmError as error:
        if not held_out:
            raise
        raise PfedafmError(f"{error}; {own} clients and held_out_clients = {held_out}") from None


def _among(config: Config, dataset: Dataset, count: int) -> Partition:
    if config.partition.endswith(".npz"):
        found = Partition.load(config.partition).check(len(dataset.images), count)
        if config.validation_fraction and not any(map(len, found.validation)):
            found = found.with_validation(dataset.labels, config.validation_fraction, config.seed)
        return replace(found, about=f"{found.about}, from {config.partition}")
    return make_partition(
        dataset.labels,
        dataset.num_train,
        count,
        kind=config.partition,
        classes_per_client=config.classes_per_client,
        gamma=config.gamma,
        protocol=config.protocol,
        validation_fraction=config.validation_fraction,
        min_samples=config.min_samples,
        seed=config.seed,
        num_classes=dataset.num_classes,
        users=dataset.users,
    )
