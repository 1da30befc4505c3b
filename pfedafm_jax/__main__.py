"""`pfedafm COMMAND …`, or `python -m pfedafm_jax COMMAND …`."""

from pfedafm_jax.cli.main import main

if __name__ == "__main__":
    main()
