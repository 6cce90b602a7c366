"""Starts the scripts as a user does (start), or forks their ranks (train), and reads what they print and save."""
import contextlib
import functools
import gc
import multiprocessing
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed

ROOT = Path(__file__).resolve().parent.parent
ARROWS = [*dict.fromkeys(arrow for chapter in ("docs/diffs.md", "docs/recipes.md")  # from base to script
                         for arrow in re.findall(r"<!-- diff (\S+) (\S+) ", (ROOT / chapter).read_text()))]
SCRIPTS = ["single_gpu.py", *(new for _, new in ARROWS if not new.startswith("recipes/"))]
EXAMPLES = {"waves": ("--epochs", "2", "--batch-size", "48"),
            "steps": ("--max-steps", "30", "--batch-size", "9", "--accumulation", "4"),  # for each of three ranks 6 and 2
            "language_model": ("--epochs", "5"),  # after the third its learning rate falls
            "autoencoder": ("--epochs", "2"),
            "stream": ("--samples", "961"),
            "contrastive": ("--epochs", "2")}
BY_TORCHRUN = ["multigpu_torchrun.py", "multinode.py"]
RECIPES = sorted(f"recipes/{file.name}" for file in ROOT.glob("recipes/*.py"))
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
RESTARTS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
PACKAGES = {"ip": "iproute2", "nft": "nftables", "munged": "munge", "srun": "slurm-client"}  # others have their command's name

# Optimizers, in the place of the scripts' line
SGD = "torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)"
ADAMW = "torch.optim.AdamW(model.parameters(), lr=args.lr)"
TWO_RATES = """torch.optim.SGD([{"params": model[:-1].parameters(), "lr": args.lr / 2},
                                 {"params": model[-1].parameters()}], lr=args.lr, momentum=0.9)"""

# Lines that a process runs before the script
IN_FLOAT64 = "import torch; torch.set_default_dtype(torch.float64)\n"  # where the order of a sum hardly matters
TWO_GPUS = """import torch
torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
torch.accelerator.device_count = lambda: 2
"""
# Dynamo's graphs stay as they are: a compiler takes a second or two for each kernel.
EAGERLY = """
import functools, torch
torch.nn.Module.compile = functools.partialmethod(torch.nn.Module.compile, backend="aot_eager")
"""
EXACT_ON_GPUS = """import torch
torch.backends.cudnn.allow_tf32 = False
torch.use_deterministic_algorithms(True, warn_only=True)  # vgg11's AdaptiveAvgPool2d((7, 7)) has no such backward in CUDA
"""


def little_data(train=240, held_out=51):
    """Lines by which the data that are made in memory are these few."""
    return f"""
import torch, utils
def little_data():
    generator = torch.Generator().manual_seed(0)
    for size in ({train}, {held_out}):
        labels = torch.randint(10, (size,), generator=generator)
        images = torch.randn(size, 3, 32, 32, generator=generator) + labels[:, None, None, None] / 5
        yield torch.utils.data.TensorDataset(images, labels)
utils.synthetic_data = lambda: [*little_data()]
"""


SMALL, LITTLE_DATA = ("--batch-size", 48), little_data()  # five steps an epoch
EXACT = IN_FLOAT64 + LITTLE_DATA
started = []  # all jobs of a test
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs, and all that they start, ignore Ctrl-C


def needs(*commands):
    if missing := [PACKAGES.get(command, command) for command in commands if not shutil.which(command)]:
        pytest.skip(f"needs a package: apt-get install {' '.join(missing)}")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Each test works in a folder of its own, finds torchrun, and leaves no process behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    yield tmp_path
    while started:
        job = started.pop()
        job.kill()
        print(job.stdout, job.stderr)  # which pytest shows where a test has failed


def without_gloo(text):
    return re.sub(r"(?m)^\[Gloo].*\n", "", text)  # torch 2.10 announces each rank so


class Job:
    """A started command, with all processes that come of it: a mark in their environment shows them."""

    def __init__(self, command, cwd=".", **env):
        self.mark, self.output, self.errors = str(uuid.uuid4()), tempfile.TemporaryFile(), tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [str(word) for word in command], cwd=cwd, stdin=subprocess.DEVNULL, stdout=self.output, stderr=self.errors,
            start_new_session=True, env={**os.environ, **first(), "TEST_JOB": self.mark, **env})
        started.append(self)

    @property
    def stdout(self):
        return without_gloo(os.pread(self.output.fileno(), 2**24, 0).decode())

    @property
    def stderr(self):
        return os.pread(self.errors.fileno(), 2**24, 0).decode()

    def wait_for(self, text):
        """Until the job has printed this."""
        while text not in self.stdout:
            assert self.process.poll() is None, f"did not print {text!r}:\n{self.stdout}{self.stderr}"
            time.sleep(0.05)

    def wait(self):
        """The job's status, once all its processes have ended."""
        status, end = self.process.wait(), time.monotonic() + 60
        while pids := self.processes():
            assert time.monotonic() < end, f"left behind: {pids}\n{self.stdout}{self.stderr}"
            time.sleep(0.05)
        return status

    def processes(self):
        """The ids of the job's processes, wherever they are in the process tree."""
        found = []
        for file in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if self.mark.encode() in file.read_bytes():
                    found.append(int(file.parent.name))
        return found

    def kill(self):
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


scratch = functools.cache(lambda: tempfile.TemporaryDirectory(prefix="first-"))  # gone when Python ends


def first(lines=""):
    """An environment in which every Python process runs these lines first. What imports leave is frozen: that saves 0.9 s."""
    folder = tempfile.mkdtemp(dir=scratch().name)
    Path(folder, "sitecustomize.py").write_text(f"import gc; gc.disable(); import torch; gc.enable(); gc.freeze()\n{lines}")
    return {"PYTHONPATH": f"{folder}:{ROOT}"}


def after(function, expression):
    """Lines by which each rank evaluates an expression after each call of a function, and writes down what it gives."""
    return f"""
import functools, os, signal, time, torch, zlib
def wrapped(function):
    @functools.wraps(function)
    def logged(*given, **options):
        result = function(*given, **options)
        with open("log." + os.environ.get("RANK", "0"), "a") as file:
            print({expression}, file=file)
        return result
    return logged
{function} = wrapped({function})
"""


def hold(function, unless="False", until="os.path.exists('go')"):
    """Lines by which each rank waits after a call of a function, unless an expression is true, until another one is."""
    return after(function, f"{unless} or [time.sleep(0.05) for _ in iter(lambda: bool({until}), True)]")


def options(script, processes, device):
    """The device of pytest's --device, or the script's own choice. Processes that share a GPU can do so by gloo alone."""
    chosen = os.environ.get("TEST_DEVICE", "cpu")
    shared = chosen != "cpu" and processes > torch.accelerator.device_count()
    return [*(["--device", chosen] if device else []), *(["--backend", "gloo"] if device and shared else []),
            *(["-g", processes] if processes and Path(script).name == "multigpu_spawn.py" else [])]


def exactly(before):
    """Where --device asks for a GPU: also lines by which it rounds in the same way each time."""
    return EXACT_ON_GPUS + before if os.environ.get("TEST_DEVICE", "cpu") != "cpu" else before


def start(script, *arguments, processes=2, torchrun=(), before="", **env):
    """Start a script by its command line."""
    launcher = [*TORCHRUN, "--standalone", f"--nproc_per_node={processes}", *torchrun]
    line = [*(launcher if script in BY_TORCHRUN else [sys.executable]), ROOT / script, *options(script, processes, True)]
    return Job([*line, *arguments], **first(exactly(before)), **env)


forks = multiprocessing.get_context("forkserver")  # a process that has imported all that takes ranks seconds
forks.set_forkserver_preload(["torch._dynamo", "torch.distributed.nn", "torch.distributed.tensor", "torchvision.models"])


def be_rank(script, arguments, folder, output, before, environment):
    """A fork becomes what a launcher starts."""
    gc.freeze()  # as in first()
    os.chdir(folder)
    for stream, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{output}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ.update(environment, PYTORCH_NVML_BASED_CUDA_CHECK="1")  # another check could not be followed by a fork
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # of loader workers; what is forked here has another default
    torch.multiprocessing.spawn = functools.partial(torch.multiprocessing.start_processes, start_method="fork")
    sys.path.insert(0, str(ROOT))
    exec(before, {})
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def fork(script, arguments, folder, output, processes, before, environment):
    """Run a script in forked ranks, which start in half a second instead of four; their exit codes. 0 processes: no launcher."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun has one
    launched = {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0, "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": store.port, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    ranks = [{**launched, "RANK": rank, "LOCAL_RANK": rank} for rank in range(processes)] or [{}]
    forked = []
    try:
        for rank in ranks:
            variables = {name: str(value) for name, value in {**environment, **rank}.items()}
            forked.append(forks.Process(target=be_rank, args=(script, arguments, folder, output, before, variables)))
            forked[-1].start()
        for process in forked:
            process.join()
    finally:
        for process in forked:
            process.kill()
    return [process.exitcode for process in forked]


def train(script, *arguments, processes=2, device=True, before="", status=0, **environment):
    """Run a script to its end in forked ranks, and check how they end."""
    words, before = [*map(str, [*options(script, processes, device), *arguments])], exactly(before)
    launched = Path(script).name not in {*SCRIPTS} - {*BY_TORCHRUN}  # also of a copy
    with tempfile.TemporaryDirectory() as output:
        try:
            codes = fork(str(ROOT / script), words, os.getcwd(), output, processes if launched else 0, before, environment)
        finally:
            stdout, stderr = (without_gloo(Path(output, name).read_text()) for name in ("stdout", "stderr"))
            print(stdout, stderr)  # which pytest shows where a test has failed
    assert codes == [status] * len(codes)
    return SimpleNamespace(stdout=stdout, stderr=stderr)


def with_optimizer(script, optimizer):
    """A copy in which that line is another one, as a user would write it."""
    copy = Path("copies", Path(script).name)
    copy.parent.mkdir(exist_ok=True)
    copy.write_text((ROOT / script).read_text().replace(SGD, optimizer))
    return copy.resolve()


def figures(text):
    """Loss and accuracy (in percent) of each epoch that was printed."""
    found = re.findall(r"epoch +(\d+)/\d+ \| loss (\S+) \| accuracy (\S+)% \| \S+ samples/s \| \d+:\d\d left", text)
    return {int(epoch): (float(loss), float(accuracy)) for epoch, loss, accuracy in found}


def check_close(printed, expected, loss=1e-3, accuracy=100 / 509 + 0.01):  # one sample, rounded; 100: not compared
    assert printed.keys() == expected.keys() != set()
    for epoch in printed:
        assert printed[epoch] == (pytest.approx(expected[epoch][0], abs=loss), pytest.approx(expected[epoch][1], abs=accuracy))


def load(path):
    return torch.load(path, weights_only=True, map_location="cpu")


def formats(path):
    saved = load(path)
    return {str(tensor.dtype) for part in (saved["model"], *saved["optimizer"]["state"].values()) for tensor in part.values()}


def check_equal(path, expected):
    """The weights in two files, where all was done in float64."""
    states = [saved.get("model", saved) for saved in (load(path), load(expected))]
    assert states[0].keys() == states[1].keys()
    other, one = (torch.cat([tensor.flatten() for tensor in state.values()]) for state in states)
    assert (other - one).norm() <= 1e-9 * one.norm()
