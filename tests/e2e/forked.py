"""The command line in forks of one process that has imported what commands import: each alone would take seconds for it.

A line of JSON comes in (words, folder, files for what is printed), the exit code goes out. A fork has its own memory, its
own signals and no thread of another command's.
"""

import contextlib
import json
import os
import subprocess
import sys
import traceback
from typing import Any

THREADS = int(os.environ["OMP_NUM_THREADS"])
# A fork has none of the threads that an import may have begun, and would wait for them.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def serve() -> None:
    import transformers.models.llama.modeling_llama  # noqa: F401

    import finefit.chat
    import finefit.merge
    import finefit.trainer  # noqa: F401

    for line in sys.stdin:
        print(_in_fork(json.loads(line)) if _is_alone() else _in_process(json.loads(line)), flush=True)


def _is_alone() -> bool:
    """Whether there is no thread but this one."""
    tasks = "/proc/self/task"
    return os.path.isdir(tasks) and len(os.listdir(tasks)) == 1


def _in_fork(asked: dict[str, Any]) -> int:
    pid = os.fork()
    if not pid:
        _carry_out(**asked)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _in_process(asked: dict[str, Any]) -> int:
    """As users have it."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS), "MKL_NUM_THREADS": str(THREADS)}
    with open(asked["out"], "w") as out, open(asked["err"], "w") as err:
        command = [sys.executable, "-m", "finefit", *asked["words"]]
        done = subprocess.run(
            command, cwd=asked["cwd"], env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err
        )
    return done.returncode


def _carry_out(words: list[str], cwd: str | None, out: str, err: str) -> None:
    """Never returns."""
    for number, path in enumerate(("/dev/null", out, err)):
        os.dup2(os.open(path, os.O_RDONLY if not number else os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.chdir(cwd or ".")
    sys.argv = ["finefit", *words]
    sys.modules["torch"].set_num_threads(THREADS)
    code = 0
    try:
        from finefit.cli import main

        main()
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve()
