"""An argument does what it says, or the run ends in one line that names it, before anything is written."""
import sys
from pathlib import Path

import pytest
from launch import TWO_GPUS, Job, figures, little_data, start, train

BAD = {  # script and arguments; what the line says
    "single_gpu.py many": "argument total_epochs: 'many' is not a whole number of at least 1",
    "single_gpu.py --batch-size 3841": "argument --batch-size: 3841 exceeds the 3840 training samples",
    "multigpu_spawn.py --batch_size 241 -g 2 --device cpu": "argument --batch-size: 241 is not divisible by 2 processes, 242 is",
    "dp.py --lr nan": "argument --lr: 'nan' is not a finite number above 0",
    "single_gpu.py --lr small": "argument --lr: invalid positive_number value: 'small'",
    "single_gpu.py --dataset ImageNet": "argument --dataset: invalid choice: 'ImageNet' (choose from",
    "single_gpu.py --model resnet19": "argument --model: invalid choice: 'resnet19' (choose from",
    "single_gpu.py --device gpu": "argument --device: invalid choice: 'gpu' (choose from",
    "single_gpu.py --workers -1": "argument --workers",
    "multigpu_spawn.py -n 2": "argument -n/--nodes: on each of several machines, set MASTER_ADDR and MASTER_PORT",
    "multigpu_spawn.py -nr 1": "argument -nr/--node-rank: 1 must be less than -n 1",
    "multinode.py": "start it with its launcher: torchrun --nnodes=2 --nproc_per_node=4 --rdzv-backend=c10d "
                    "--rdzv-endpoint=HOST:29400 multinode.py\n",
    "recipes/bf16.py": "start it with its launcher: torchrun --standalone --nproc_per_node=4 -m recipes.bf16 50 10\n"}


@pytest.mark.parametrize("command", BAD)
def test_a_bad_argument_ends_the_run_in_one_line_and_writes_nothing(command, folder):
    script, *arguments = command.split()
    batch_step = {"SLURM_JOB_ID": 1, "SLURM_NTASKS": 2, "SLURM_PROCID": 0}  # as sbatch sets them, before any srun
    job = train(script, *arguments, processes=0, device=False, status=2, **batch_step)
    assert job.stderr.startswith(f"{Path(script).name}: ") and BAD[command] in job.stderr
    assert job.stderr.count("\n") == 1 and job.stdout == "" and not list(folder.iterdir())


def test_what_all_ranks_see_one_says():
    job = start("multigpu_torchrun.py", "--batch-size", 241)
    assert job.wait() == 1 and job.stderr.count("argument --batch-size: 241 is not divisible by 2 processes, 242 is") == 1


def test_scripts_that_no_launcher_starts_refuse_torchrun():
    for script in ("single_gpu.py", "multigpu_spawn.py"):
        job = train(script, processes=0, status=2, LOCAL_WORLD_SIZE="2")
        assert job.stderr == f"{script}: start it with python: torchrun (LOCAL_WORLD_SIZE) starts it 2 times\n"
        assert job.stdout == ""


def test_the_default_batch_is_one_for_eight_machines_of_eight_and_for_most_other_clusters():
    """The check alone, as rank 0 makes it: 64 processes would take this machine's memory."""
    counts = [*range(1, 7), 8, 10, 12, 15, 16, 20, 24, 30, 32, 40, 48, 60, 64, 80, 96, 120, 160]
    job = Job([sys.executable, "-c", f"import utils; [utils.check_run(utils.parse_args(''), count) for count in {counts}]"])
    assert job.wait() == 0 and "batch: 960, per process: 15\n" in job.stdout, job.stderr


def test_more_processes_than_gpus_are_refused_unless_they_may_share_them():
    here = {"processes": 3, "before": TWO_GPUS}
    spawn = train("multigpu_spawn.py", device=False, status=2, **here)
    assert "argument -g/--gpus: nccl needs a GPU for each process, but with --device cuda there are 2 GPUs for 3" in spawn.stderr
    assert "argument --backend: nccl needs a GPU" in train("multinode.py", device=False, status=2, **here).stderr
    on_cpu = train("multigpu_spawn.py", 1, "--device", "cpu", device=False, **here)
    assert "processes: 3, device: cpu, backend: gloo" in on_cpu.stdout


TWO_XPUS = TWO_GPUS.replace("cuda", "xpu")


def test_gloo_is_refused_where_it_cannot_send_the_tensors_of_the_device():
    job = train("multigpu_torchrun.py", "--backend", "gloo", device=False, before=TWO_XPUS, status=2, processes=1)
    assert job.stderr == "multigpu_torchrun.py: argument --backend: gloo cannot send the tensors of --device xpu\n"


def test_a_failed_download_is_one_line():
    """No name resolves where the only proxy is a port that nobody listens on."""
    nowhere = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    job = train("multigpu_spawn.py", 1, "--dataset", "CIFAR10", status=1, **nowhere)
    assert "was neither read from data nor downloaded" in job.stderr and job.stderr.count("\n") == 1


FETCHES_SLOWLY = """
import os, time, torch
from torchvision.datasets import FashionMNIST
def download(self):
    if not self._check_exists():
        time.sleep(1)  # in which another process would begin too
        os.makedirs(f"{self.root}/{self.train}")  # fails where one has
FashionMNIST.download = download
FashionMNIST._check_exists = lambda self: os.path.exists(f"{self.root}/{self.train}")
FashionMNIST._load_data = lambda self: (torch.zeros(960, 28, 28, dtype=torch.uint8), torch.zeros(960, dtype=torch.int64))
"""


@pytest.mark.timeout(120)  # a rank whose partner has failed would wait for it
@pytest.mark.parametrize("script", ["multigpu_spawn.py", "multigpu_torchrun.py"])
def test_one_process_fetches_a_missing_dataset_while_the_others_wait(script):
    assert list(figures(train(script, 1, "--dataset", "FashionMNIST", before=FETCHES_SLOWLY).stdout)) == [1]


@pytest.mark.parametrize("model", ["resnet50", "convnext_tiny", "vgg11"])
def test_the_models_without_a_test_of_their_own_train_too(model):
    job = train("multigpu_torchrun.py", 1, "--model", model, "--batch-size", 8, processes=1, before=little_data(8, 8))
    assert 0 < figures(job.stdout)[1][0] < 10 and "saved" in job.stdout
