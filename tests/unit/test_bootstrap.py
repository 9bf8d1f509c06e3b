"""What scripts/bootstrap.py decides, without installing anything; and what scripts/budget.py counts."""

import importlib.util
import json
import socket
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def script(name):
    spec = importlib.util.spec_from_file_location(f"finefit_scripts_{name}", SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bootstrap, budget = script("bootstrap"), script("budget")


def facts(**changes):
    def never():
        raise AssertionError("asked although it was decided")

    known = {name: (lambda value=value: value) for name, value in changes.items()}
    return {name: known.get(name, never) for name in ("system", "driver", "index", "wheel")}


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        ({"system": "Darwin"}, ["torch>=2.11"]),
        ({"system": "Linux", "driver": True}, ["torch>=2.11"]),
        (
            {"system": "Linux", "driver": False, "index": True},
            ["torch>=2.11", "--index-url", "https://download.pytorch.org/whl/cpu"],
        ),
        (
            {"system": "Linux", "driver": False, "index": False, "wheel": ("2.13.0+cpu", "/wheels")},
            ["torch==2.13.0+cpu"],
        ),
        ({"system": "Linux", "driver": False, "index": False, "wheel": ("", "")}, ["torch>=2.11"]),
    ],
)
def test_which_torch(seen, words):
    assert words == bootstrap.choose_torch(facts(**seen))[0]


def test_a_cuda_build_for_want_of_another_is_said():
    says = bootstrap.choose_torch(facts(system="Linux", driver=False, index=False, wheel=("", "")))[1]
    assert says == "torch: pip's own, a CUDA build of several GB, because no CPU build could be found"


def test_the_newest_fitting_cpu_wheel(tmp_path):
    for name in (
        "torch-2.9.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl",
        "torch-2.13.0%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.whl",
        "torch-2.12.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl",
        "torch-2.14.0+cpu-cp312-cp312-manylinux_2_28_x86_64.whl",
        "torch-2.14.0+cpu-cp311-cp311-manylinux_2_28_aarch64.whl",
        "torch-2.14.0-cp311-cp311-manylinux_2_28_x86_64.whl",
        "torch-2.14.0+cpu.whl",
        "torchvision-2.14.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl",
    ):
        (tmp_path / name).touch()
    assert ("2.13.0+cpu", str(tmp_path)) == bootstrap.cpu_wheel([str(tmp_path)], "cp311", "x86_64")
    assert bootstrap.cpu_wheel([str(tmp_path)], "cp313", "x86_64") == ("", "")
    assert bootstrap.cpu_wheel(["/nowhere"], "cp311", "x86_64") == ("", "")


def test_folders_that_pip_looks_into(tmp_path):
    a, b, c = (tmp_path / name for name in "abc")
    for folder in (a, b, c):
        folder.mkdir()
    config = f"global.index-url='https://x'\nglobal.find-links='file://{a} https://y/z'\ninstall.find-links='{b}'\n"
    assert [str(c), str(a), str(b)] == bootstrap.find_links(config, f"{c} /nowhere")


def test_a_second_run_has_nothing_to_do(tmp_path):
    project = tmp_path / "pyproject.toml"
    project.write_text("[project]\n")
    first = bootstrap.fingerprint(project)
    stamp = {"pyproject": first, "extras": ["test", "train"]}
    assert bootstrap.is_done(stamp, first, ["train"])
    assert not bootstrap.is_done(stamp, first, ["train", "check"])
    assert not bootstrap.is_done(None, first, [])
    project.write_text("[project]\nname = 'x'\n")
    assert not bootstrap.is_done(stamp, bootstrap.fingerprint(project), ["train"])


def test_stamps(tmp_path):
    path = tmp_path / "stamp.json"
    assert None is bootstrap.read_stamp(path)
    for text in ("{", "[]"):
        path.write_text(text)
        assert None is bootstrap.read_stamp(path)
    path.write_text(json.dumps({"extras": []}))
    assert bootstrap.read_stamp(path) == {"extras": []}


def test_versions():
    assert bootstrap.numbers("2.13.0+cpu") == (2, 13, 0)
    assert bootstrap.numbers("2.9.1") < bootstrap.OLDEST_TORCH <= bootstrap.numbers("2.11.0a0")


def test_unknown_extras_are_refused(capsys):
    assert bootstrap.main(["trian"]) == 2
    assert capsys.readouterr().err == "bootstrap: unknown extra 'trian': there are train, test, check\n"


@pytest.fixture
def without_ensurepip(tmp_path, monkeypatch):
    """A repository without .venv, and a Python that lacks ensurepip; gives the commands that were tried."""
    monkeypatch.setattr(bootstrap, "VENV", str(tmp_path / ".venv"))
    tried = []
    monkeypatch.setattr(bootstrap, "_ends_well", lambda command: tried.append(command) is not None)
    return tried


def test_without_ensurepip_a_user_is_told_the_command(without_ensurepip, monkeypatch, capsys):
    monkeypatch.setattr(bootstrap, "venv_package", lambda _: "python3-venv")
    monkeypatch.setattr(bootstrap.os, "geteuid", lambda: 1000)
    assert bootstrap._make_venv() == 2
    assert "Type: sudo apt-get install -y python3-venv\n" in capsys.readouterr().err
    assert [command for command in without_ensurepip if command[0] == "apt-get"] == []


def test_without_ensurepip_root_installs_it(without_ensurepip, monkeypatch, capsys):
    monkeypatch.setattr(bootstrap, "venv_package", lambda _: "python3-venv")
    monkeypatch.setattr(bootstrap.os, "geteuid", lambda: 0)
    assert bootstrap._make_venv() == 2
    assert ["apt-get", "install", "-y", "python3-venv"] in without_ensurepip
    assert ["apt-get", "update"] in without_ensurepip


def test_without_ensurepip_where_there_is_no_apt(without_ensurepip, monkeypatch, capsys):
    monkeypatch.setattr(bootstrap, "venv_package", lambda _: "")
    assert bootstrap._make_venv() == 2
    assert "has no ensurepip: take another Python" in capsys.readouterr().err


def test_hosts_that_answer():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        assert not bootstrap.is_reachable("127.0.0.1", port)
        server.listen()
        assert bootstrap.is_reachable("127.0.0.1", port)
    assert not bootstrap.is_reachable("host.invalid", 443)


def test_the_size_budget():
    def found(text):
        return [line.partition(": ")[2] for line in budget.excesses(Path("x.py"), text)]

    assert found("\n" * 401) == ["401 lines, at most 400"]
    assert found("def f():\n" + "    0\n" * 100) == ["f has 101 lines, at most 100"]
    assert found("class C:\n" + "    x = 0\n" * 200) == ["C has 201 lines, at most 200"]
    assert found("def f(a, b, c, d, e, f, /, g, h, *, i): 0\n") == ["f takes 8 positional arguments, at most 7"]
    assert found("class C:\n    def f(self, a, b, c, d, e, f, g): 0\n") == []
    assert found("@app.command()\ndef f(a, b, c, d, e, f, g, h): 0\n") == []
    loop = budget.ROOT / "src" / "finefit" / "loop.py"
    assert [line.partition(": ")[2] for line in budget.excesses(loop, "def train():\n" + "    0\n" * 80)] == [
        "train has 81 lines, at most 80"
    ]
