"""`pfedafm COMMAND …`, or `python -m pfedafm_jax COMMAND …`."""

import importlib
import sys

COMMANDS = {
    "run": "one run of one method",
    "compare": "several methods, or seeds, side by side",
    "sweep": "settings, chosen on held-out training data",
    "plot": "runs in one plot",
    "report": "runs as one page",
    "predict": "classify images with a trained client",
    "export": "write a trained client for use elsewhere",
    "join": "admit a newcomer to a trained run",
    "serve": "the server of a real federation, on Flower",
    "node": "one client of a real federation",
    "certs": "certificates and keys for a real federation",
}


def main() -> None:
    from pfedafm_jax.base.errors import bad, known
    from pfedafm_jax.cli import guarded

    def command(argv: list[str]) -> int:
        if not argv or argv[0] in ("-h", "--help"):
            print("usage: pfedafm COMMAND …      (pfedafm COMMAND --help says more)\n")
            print("\n".join(f"  {name:<9}{about}" for name, about in COMMANDS.items()))
            return 0
        if argv[0] not in COMMANDS:
            raise bad("command", argv[0], known(argv[0], COMMANDS))
        sys.argv[0] = f"pfedafm {argv[0]}"
        return importlib.import_module(f"pfedafm_jax.commands.{argv[0]}").main(argv[1:])

    guarded(command)


if __name__ == "__main__":
    main()
