"""Writes a trained client for use elsewhere: `pfedafm export RUN --client 3 --out DIR`."""

import argparse

from pfedafm_jax.cli.commands.predict import add_client, chosen
from pfedafm_jax.inference.export import export_client
from pfedafm_jax.runs.progress import clean, console


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("pfedafm export", description=__doc__, allow_abbrev=False)
    add_client(parser)
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="a folder: new, empty, or of an export"
    )
    parser.add_argument("--onnx", action="store_true", help="also as ONNX (extra: onnx)")
    asked = parser.parse_args(argv)
    for file in export_client(chosen(asked), asked.out, asked.onnx):
        console.print(f"  {clean(str(file))}  {file.stat().st_size / 1e6:.1f} MB")
    return 0
