"""The process of one contender: answers the benchmark's commands, line by line."""

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any


def build(kind: str, folder: Path, options: dict[str, Any]) -> Any:
    """The contender of this kind; each imports only what it needs."""
    from common import Work

    work = Work.load(folder)
    if kind == "torch_strongest":
        from torch_processes import TorchProcesses

        return TorchProcesses(work)
    if kind.startswith("torch"):
        from torch_loop import TorchLoop

        return TorchLoop(work, released=kind == "torch_released", **options)
    import contenders

    return contenders.KINDS[kind](work, **options)


def main() -> None:
    # Answers go to the pipe; whatever else is printed goes where warnings go.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    kind, folder, options = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    contender = None
    for line in sys.stdin:
        command, arguments = json.loads(line)
        try:
            if contender is None:
                contender = build(kind, folder, options)
            answer = {"result": getattr(contender, command)(**arguments)}
        except Exception as error:
            if type(error).__name__ != "PfedafmError":
                traceback.print_exc()
            answer = {"error": str(error) or type(error).__name__}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
