"""The commands: `pfedafm NAME …`, one file each, every one with a `main(argv) -> exit code`."""
