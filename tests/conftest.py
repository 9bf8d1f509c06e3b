"""Two threads, caches of their own, traces made in this process: nothing is left in the user's folders."""

import os
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "2"  # before torch is imported: results of products depend on it
os.environ["GOMP_SPINCOUNT"] = "0"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of tests start a process: let the first compile for all

import pytest

from finefit import coefficients


@pytest.fixture(autouse=True, scope="session")
def cache_folder(tmp_path_factory):
    """An empty cache for the whole session."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(autouse=True, scope="session")
def traced_in_process(cache_folder):
    """What is not shipped is traced here, once, rather than in a subprocess; gives the real ``derive``."""
    real = coefficients.derive

    def derive(subject: str, keys: list[str], into: Path | None = None) -> None:
        from finefit import trace

        file = into or coefficients._cache(subject)
        graphs = dict(coefficients.read(file))
        for key in keys:
            graphs[key] = trace.first_trace(trace.subject_of(subject, key), key)
        coefficients.write(file, {"graphs": graphs})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coefficients, "derive", derive)
        yield real


@pytest.fixture(autouse=True)
def no_mode_is_left():
    """A ledger that a test leaves on makes all that come after it in this process many times slower."""
    yield
    if "torch" in sys.modules:
        from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

        assert _get_current_dispatch_mode_stack() == []


@pytest.fixture(scope="session")
def model_folder():
    """SmolLM2-135M-Instruct, or a skip."""
    default = Path.home() / ".cache" / "finefit" / "models" / "SmolLM2-135M-Instruct"
    folder = Path(os.environ.get("FINEFIT_MODEL", default))
    if not (folder / "config.json").is_file():
        pytest.skip("needs SmolLM2-135M-Instruct: set FINEFIT_MODEL to its folder")
    return folder
