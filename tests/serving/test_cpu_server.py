"""Installing, starting and stopping, without a real server: a stand-in for pip and a small HTTP server instead."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from tiny_weights import tensor_shapes

from hicache_lab.base.errors import HostError, ServerError, UsageError
from hicache_lab.base.resources import data_dir
from hicache_lab.cli import main
from hicache_lab.serving import cpu_server
from hicache_lab.serving.cpu_server import environment as envs
from hicache_lab.serving.cpu_server import process
from hicache_lab.serving.cpu_server.home import built_aside, home
from hicache_lab.serving.local import health
from hicache_lab.sizing.models import is_known
from hicache_lab.sizing.tiny_models import TINY_MODELS, tiny_config

STUBS = data_dir() / "cpu_server" / "stubs"

# ---- where things lie


def test_the_folder_is_the_users_cache_and_can_be_chosen(tmp_path: Path) -> None:
    assert home(None, {"HICACHE_LAB_HOME": str(tmp_path)}) == tmp_path
    assert home(None, {"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "hicache_lab"
    assert home(None, {}) == Path("~/.cache/hicache_lab").expanduser()
    assert home(tmp_path / "x", {"HICACHE_LAB_HOME": "/elsewhere"}) == tmp_path / "x"


def test_what_is_built_aside_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "models"
    with pytest.raises(RuntimeError), built_aside(target) as aside:
        (aside / "half").touch()
        assert not target.exists()
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    dead = tmp_path / ".models.partial-999999999"
    dead.mkdir()
    with built_aside(target) as aside:
        (aside / "whole").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["models"]
    with built_aside(target):  # another process was faster: its result stays
        pass
    assert (target / "whole").exists()


# ---- installation


class FakePip:
    """Stands for the installation's commands."""

    def __init__(self, fail_at: str = "") -> None:
        self.fail_at, self.commands = fail_at, []

    def run(self, title: str, command: list[str]) -> str:
        self.commands.append(command)
        if self.fail_at and self.fail_at in title:
            raise HostError(f"server install: step {title!r} failed (exit 1):\n  no such wheel")
        return "3.11.7 2.13.0+cpu"


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip()
    monkeypatch.setattr(envs, "_Steps", lambda write, progress: fake)
    return fake


def test_a_second_installation_is_instant_and_other_pins_are_another_one(tmp_path, pip, monkeypatch) -> None:
    first = cpu_server.install("0.5.23", home_dir=tmp_path)
    count = len(pip.commands)
    assert count == 4
    assert cpu_server.install("0.5.23", home_dir=tmp_path) == first
    assert len(pip.commands) == count
    assert cpu_server.installed("0.5.23", home_dir=tmp_path) == first
    assert cpu_server.installed("0.5.10", home_dir=tmp_path) is None
    pins = envs.requirements("0.5.23")
    monkeypatch.setattr(envs, "requirements", lambda release: (*pins, "extra==1"))
    assert cpu_server.installed("0.5.23", home_dir=tmp_path) is None


def test_a_failed_installation_leaves_nothing(tmp_path: Path, pip: FakePip) -> None:
    pip.fail_at = "pinned packages"
    with pytest.raises(HostError, match="no such wheel"):
        cpu_server.install("0.5.10", home_dir=tmp_path)
    assert list((tmp_path / "cpu_server" / "envs").iterdir()) == []


def test_an_environment_without_its_marker_is_not_trusted(tmp_path: Path, pip: FakePip) -> None:
    done = cpu_server.install("0.5.10", home_dir=tmp_path)
    (done.path / "complete.json").write_text('{"release": "0.5')
    assert cpu_server.installed("0.5.10", home_dir=tmp_path) is None
    assert cpu_server.install("0.5.10", home_dir=tmp_path).release == "0.5.10"
    assert len(pip.commands) == 8


def test_a_full_disk_is_said_before_anything_is_fetched(tmp_path, pip, monkeypatch) -> None:
    monkeypatch.setattr(envs, "DISK_NEEDED_BYTES", 2**60)
    with pytest.raises(HostError, match=r"GB free in .* GB needed: make room"):
        cpu_server.install("0.5.10", home_dir=tmp_path)
    assert not pip.commands


def test_a_failing_command_says_its_last_lines() -> None:
    seen: list[str] = []
    steps = envs._Steps(seen.append, seen.append)
    with pytest.raises(HostError, match=r"step 'torch' failed \(exit 3\):\n  no space"):
        steps.run("torch", [sys.executable, "-c", "import sys; print('no space'); sys.exit(3)"])
    assert seen[0] == "# torch"


@pytest.mark.parametrize("release", cpu_server.RELEASES)
def test_every_package_is_pinned_exactly(release: str) -> None:
    pins = envs.requirements(release)
    assert f"sglang=={release}" in pins
    assert all(pin.count("==") == 1 for pin in pins)
    names = [pin.split("==")[0].lower() for pin in pins]
    assert len(names) == len(set(names))


def test_mistakes_of_an_installation_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--release: expected one of 0\.5\.10, 0\.5\.23"):
        cpu_server.install("0.5.9", home_dir=tmp_path)
    with pytest.raises(UsageError, match="--python: '/no/such/python' does not run"):
        cpu_server.install("0.5.10", home_dir=tmp_path, python="/no/such/python")


# ---- what is started


def test_flags_pass_through_and_replace_our_defaults() -> None:
    flags = cpu_server.Launch("0.5.23").sglang_flags
    assert flags[flags.index("--hicache-ratio") + 1] == "4"
    ours = ("--max-total-tokens", "4096", "--hicache-size=1", "--hicache-write-policy", "write_back")
    flags = cpu_server.Launch("0.5.23", flags=ours).sglang_flags
    assert flags[-5:] == ours
    assert flags.count("--max-total-tokens") == 1
    assert "--hicache-ratio" not in flags
    plain = cpu_server.Launch("0.5.23", hicache=False).sglang_flags
    assert "--enable-hierarchical-cache" not in plain


@pytest.mark.parametrize(
    "flag",
    [
        *("--host", "--port", "--tp", "--model-path", "--api-key", "--device=cuda", "--dist-init-addr", "--config"),
        *("--ssl-certfile", "--hos", "--hos=0.0.0.0", "--po", "--api", "--conf", "--ssl-key", "--tensor", "--dev"),
    ],
)
def test_flags_that_would_leave_this_machine_or_break_it_are_refused(flag: str) -> None:
    with pytest.raises(
        UsageError, match=rf"^{flag.partition('=')[0]}: not passed through( \(a beginning of --[a-z-]+\))?: "
    ):
        cpu_server.Launch("0.5.23", flags=(flag, "x"))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tp_size": 0}, "--tp-size"),
        ({"tp_size": 4096}, "--tp-size"),
        ({"port": 80}, "--port"),
        ({"name": "../up"}, "--name"),
        ({"name": ""}, "--name"),
    ],
)
def test_mistakes_of_a_launch_are_named(options, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        cpu_server.Launch("0.5.23", **options)


def test_ranks_get_a_core_each_and_one_rank_gets_none() -> None:
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in cpu_server.Launch("0.5.23").environ()
    assert cpu_server.Launch("0.5.23", tp_size=2).environ()["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1"


def test_tiny_models_have_every_tensor_of_their_architecture() -> None:
    llama = tensor_shapes(tiny_config("tiny-llama"))
    assert llama["model.layers.3.self_attn.k_proj.weight"] == (32, 64)
    assert len(llama) == 3 + 4 * (2 + 4 + 3)
    mla = tensor_shapes(tiny_config("tiny-mla"))
    assert mla["model.layers.2.self_attn.kv_a_proj_with_mqa.weight"] == (80, 64)
    assert mla["model.layers.0.mlp.up_proj.weight"] == (128, 64)
    assert mla["model.layers.1.mlp.experts.3.down_proj.weight"] == (64, 32)
    assert "model.layers.1.mlp.up_proj.weight" not in mla
    with pytest.raises(UsageError, match="tiny-llama, tiny-mla"):
        tiny_config("llama")


def test_tiny_models_are_not_offered_as_real_ones() -> None:
    assert not any(is_known(name) for name in TINY_MODELS)


# ---- a small server in SGLang's place

FAKE = """
import http.server, os, signal, sys, time
args = dict(zip(sys.argv[1::2], sys.argv[2::2]))
mode = os.environ.get("FAKE_MODE", "")
print("[now] starting", args["--model-path"], flush=True)
if "child" in mode and os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)
if "stubborn" in mode:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "usage" in mode:
    print("usage: sglang serve [--many]")
    print("sglang serve: error: argument --hicache-size: invalid int value: 'x'")
    sys.exit(2)
if "refuse" in mode:
    print("ValueError: Not enough host memory available. Requesting 7.00 GB but only have 3.75 GB free.", flush=True)
    sys.exit(1)
began = time.monotonic()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if "hang" not in mode and time.monotonic() - began > 0.3 else 503)
        self.end_headers()
    def log_message(self, *words): ...
http.server.HTTPServer(("127.0.0.1", int(args["--port"])), Handler).serve_forever()
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Starts the small server in SGLang's place; everything it started is gone afterwards."""
    models = tmp_path / "models"
    (models / "sglang").mkdir(parents=True)
    (models / "sglang" / "__init__.py").touch()
    (models / "sglang" / "launch_server.py").write_text(FAKE)
    monkeypatch.setattr(process, "make_models", lambda environment, home_dir: models)
    here = tmp_path / "env"
    (here / "bin").mkdir(parents=True)
    (here / "bin" / "python").symlink_to(sys.executable)
    environment = cpu_server.Environment("0.5.23", here, "0", "3.11", "0", 0.0)

    def start(mode: str = "", name: str = "default", timeout: float = 20.0, **options) -> cpu_server.Server:
        monkeypatch.setenv("FAKE_MODE", mode)
        launch = cpu_server.Launch("0.5.23", name=name, **options)
        return cpu_server.start(launch, home_dir=tmp_path, environment=environment, timeout_seconds=timeout)

    yield start
    for server in cpu_server.status(home_dir=tmp_path):
        cpu_server.stop(server.name, home_dir=tmp_path, term_seconds=0.2)


def group(pid: int) -> list[int]:
    found = []
    for one in psutil.process_iter():
        try:
            if os.getpgid(one.pid) == pid and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one.pid)
        except (psutil.Error, ProcessLookupError):
            continue
    return found


def test_start_status_logs_stop(fake, tmp_path: Path) -> None:
    server = fake()
    assert server.alive
    assert server.ready_seconds > 0.2
    assert health(server.port) == 200
    assert cpu_server.status(home_dir=tmp_path) == (server,)
    assert "[now] starting tiny-llama" in server.log()
    assert cpu_server.logs(home_dir=tmp_path) == server.log_path
    stopped = cpu_server.stop(home_dir=tmp_path)
    assert (stopped.how, server.alive, group(server.pid)) == ("TERM", False, [])
    assert cpu_server.status(home_dir=tmp_path) == ()
    with pytest.raises(UsageError, match="no server 'default' was started here"):
        cpu_server.stop(home_dir=tmp_path)


def test_a_server_that_ignores_term_is_killed_with_its_children(fake, tmp_path: Path) -> None:
    server = fake("stubborn child")
    assert len(group(server.pid)) == 2
    stopped = cpu_server.stop(home_dir=tmp_path, term_seconds=0.5)
    assert stopped.how == "KILL"
    assert stopped.seconds < 8
    assert group(server.pid) == []


def test_children_that_outlive_the_server_are_ended_too(fake, tmp_path: Path) -> None:
    server = fake("child")
    os.kill(server.pid, 9)
    psutil.Process(server.pid).wait(5)
    assert not server.alive
    assert len(group(server.pid)) == 1
    assert cpu_server.stop(home_dir=tmp_path, term_seconds=0.3).how == "KILL"
    assert group(server.pid) == []


def test_a_recycled_pid_is_left_alone(fake, tmp_path: Path) -> None:
    """The state file names a pid that now belongs to somebody else."""
    server = fake()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as other:
        state = server.log_path.with_name("state.json")
        record = json.loads(state.read_text())
        state.write_text(json.dumps(record | {"pid": other.pid}))
        assert cpu_server.status(home_dir=tmp_path) == ()
        assert cpu_server.stop(home_dir=tmp_path).how == "gone"
        assert other.poll() is None
        other.kill()
    state.write_text(json.dumps(record))


def test_the_reason_of_a_refused_start_is_sglangs_own(fake, tmp_path: Path) -> None:
    with pytest.raises(
        ServerError, match=r"ValueError: Not enough host memory available\. Requesting 7\.00 GB"
    ) as caught:
        fake("refuse")
    assert "before it was ready" in str(caught.value)
    assert str(tmp_path / "cpu_server" / "servers" / "default" / "server.log") in str(caught.value)
    assert not (tmp_path / "cpu_server" / "servers" / "default" / "state.json").exists()


def test_a_flag_that_sglang_does_not_take_is_named_without_its_usage(fake) -> None:
    with pytest.raises(ServerError, match="error: argument --hicache-size: invalid int value: 'x'") as caught:
        fake("usage")
    assert "--many" not in str(caught.value)


def test_a_folder_that_cannot_be_made_is_named(capsys) -> None:
    for words in (["install"], ["start"]):
        assert main(["server", *words, "--home", "/proc/no"]) == 1
        assert "cannot be made" in capsys.readouterr().err


def test_a_start_that_hangs_is_given_up_and_stopped(fake, tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="was not ready after 1 s"):
        fake("hang", timeout=1.0)
    assert cpu_server.status(home_dir=tmp_path) == ()


def test_an_interrupted_start_leaves_no_process(fake, tmp_path: Path) -> None:
    pids: list[int] = []

    def interrupt() -> None:
        state = tmp_path / "cpu_server" / "servers" / "default" / "state.json"
        while not state.exists():
            time.sleep(0.05)
        pids.append(json.loads(state.read_text())["pid"])
        os.kill(os.getpid(), 2)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        fake("hang")
    thread.join()
    assert group(pids[0]) == []


def test_names_and_ports_are_taken_once(fake) -> None:
    server = fake()
    with pytest.raises(UsageError, match=r"--name default: already runs SGLang 0\.5\.23"):
        fake()
    with pytest.raises(UsageError, match=f"--port {server.port}: already in use"):
        fake(name="other", port=server.port)
    assert fake(name="other").port != server.port


def test_a_model_folder_must_hold_a_config(fake, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--model: expected tiny-llama, tiny-mla or a folder with a config\.json"):
        fake(model=str(tmp_path))


# ---- the command


def test_status_and_stop_from_the_command_line(fake, tmp_path: Path, capsys) -> None:
    server = fake()
    where = ["--home", str(tmp_path)]
    assert main(["server", "status", *where, "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["base_url"], told["pid"], told["health"]) == (server.base_url, server.pid, 200)
    assert main(["server", "status", *where]) == 0
    assert "ready" in capsys.readouterr().out
    assert main(["server", "logs", *where, "--lines", "1"]) == 0
    assert capsys.readouterr().out.startswith("[now] starting")
    assert main(["server", "stop", *where]) == 0
    assert f"(pid {server.pid}) stopped on TERM" in capsys.readouterr().out
    assert main(["server", "status", *where]) == 3
    assert main(["server", "stop", "--all", *where]) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["start", "--release", "0.4.9"], "--release: expected one of"),
        (["start", "--tp-size", "0"], "--tp-size: expected 1 to"),
        (["start", "--floor", "4"], "--floor: expected a number with a unit"),
        (["start", "--", "--host", "0.0.0.0"], "--host: not passed through: the server listens on loopback only"),
        (["start", "--hicache-ratio", "4"], "own come after a double dash: server start … -- --hicache-ratio …"),
        (["stop", "--force"], "--force: not a flag of server stop"),
        (["stop", "--name", "nobody"], "no server 'nobody' was started here"),
        (["logs", "--name", "nobody"], "has no log here"),
        (["logs", "--lines", "-1"], "--lines: expected 0 or more"),
    ],
)
def test_mistakes_on_the_command_line_are_named(words, said: str, tmp_path: Path, capsys) -> None:
    assert main(["server", words[0], "--home", str(tmp_path), *words[1:]]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["begin"], ["start", "--hicache-ratio", "4"], ["start", "--tp-size", "two"]])
def test_usage_errors_exit_with_2(words) -> None:
    assert main(["server", *words]) == 2


# ---- stand-ins that need no torch


def in_standins(code: str) -> subprocess.CompletedProcess[str]:
    environ = {"PYTHONPATH": str(STUBS), "PATH": os.environ["PATH"]}
    return subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)


def test_absent_packages_import_but_do_not_pass_for_installed() -> None:
    done = in_standins(
        "import importlib.util, triton, triton.language as tl, torchvision.transforms\n"
        "from triton.runtime.jit import JITFunction\n"
        "print(importlib.util.find_spec('soundfile'), triton.cdiv(7, 2), triton.next_power_of_2(5))\n"
        "@triton.autotune(configs=[], key=[])\n@triton.jit\ndef kernel(x: tl.constexpr): ...\n"
        "print(isinstance(kernel, JITFunction), kernel.__name__)\n"
    )
    assert done.stdout.split() == ["None", "4", "8", "True", "kernel"], done.stderr


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        (
            "import triton\n@triton.jit\ndef k(): ...\nk[(1,)]()",
            "triton kernel k was launched on a machine without a GPU",
        ),
        ("import torchvision\ntorchvision.ops.nms(1)", "torchvision.ops.nms was called, and this machine has no GPU"),
        ("import triton\ntriton.runtime.driver.active", "0 active drivers"),
        ("import no_such_package", "No module named 'no_such_package'"),
    ],
)
def test_stand_ins_raise_instead_of_making_up_a_result(code: str, problem: str) -> None:
    done = in_standins(code)
    assert done.returncode != 0
    assert problem in done.stderr


def test_modules_may_use_absent_packages_while_they_are_imported(tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text(
        "import triton, triton.language as tl\n"
        "CONFIGS = [triton.Config({'BLOCK': b}, num_warps=4) for b in (32, 64)]\n"
        "SCALE = tl.constexpr(1.5)\n"
        "class Hook(triton.Something): ...\n"
        "DTYPE = tl.float32 | None\n"
    )
    done = in_standins(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import kernels; print(kernels.SCALE.value)")
    assert done.stdout.strip() == "1.5", done.stderr
