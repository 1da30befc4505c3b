"""Where arrays come from: CIFAR's archives, npm, TFDS, folders and files, LEAF, a generator."""
