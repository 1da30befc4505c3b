"""Writes a trained client for use elsewhere: `pfedafm export RUN --client 3 --out DIR`."""

from typing import ClassVar

from pfedafm_jax.base.terminal import clean, console
from pfedafm_jax.cli.commands.predict import ClientOptions, find_client
from pfedafm_jax.cli.options import read_options


class ExportOptions(ClientOptions):
    """What `pfedafm export` takes."""

    placeholders: ClassVar[dict[str, str]] = {**ClientOptions.placeholders, "out": "DIR"}

    out: str
    """A folder: new, empty, or of an export."""
    onnx: bool = False
    """Also as ONNX (extra: onnx)."""


def main(words: list[str]) -> int:
    """Writes the client that these words select."""
    asked = read_options(words, "export", __doc__ or "", ExportOptions)

    from pfedafm_jax.inference.export import export_client

    for file in export_client(find_client(asked), asked.out, asked.onnx):
        console.print(f"  {clean(str(file))}  {file.stat().st_size / 1e6:.1f} MB")
    return 0
