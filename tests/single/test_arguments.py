"""A bad argument ends the run in one line that names it, before anything is written."""
import pytest
from forked import train
from launch import BY_TORCHRUN, run

BAD = {  # script and arguments; what the line says
    "single_gpu.py many": "argument total_epochs: 'many' is not a whole number of at least 1",
    "single_gpu.py 0": "argument total_epochs",
    "dp.py 5 0.5": "argument save_every",
    "single_gpu.py --batch-size 0": "argument --batch-size",
    "single_gpu.py --batch-size 3841": "argument --batch-size: 3841 exceeds the 3840 training samples",
    "multigpu_spawn.py --batch_size 241 -g 2 --device cpu":
        "argument --batch-size: 241 does not divide by 2 processes, as 242 would",
    "single_gpu.py --lr 0": "argument --lr: '0' is not a number above 0",
    "single_gpu.py --lr nan": "argument --lr",
    "single_gpu.py --dataset ImageNet": "argument --dataset: invalid choice: 'ImageNet' (choose from",
    "single_gpu.py --model resnet19": "argument --model: invalid choice: 'resnet19' (choose from",
    "single_gpu.py --device gpu": "argument --device: invalid choice: 'gpu' (choose from",
    "single_gpu.py --workers -1": "argument --workers",
    "multigpu_spawn.py --backend mpi": "argument --backend: invalid choice: 'mpi' (choose from",
    "multigpu_spawn.py --backend nccl --device cpu": "nccl",
    "multigpu_spawn.py -g 0": "argument -g/--gpus",
    "multigpu_spawn.py -n 2": "argument -n/--nodes: several machines need MASTER_ADDR and MASTER_PORT",
    "multigpu_spawn.py -nr 1": "argument -nr/--node-rank: 1 is not below -n 1",
    "multinode.py":
        "a launcher has to start it: TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes=2 --nproc_per_node=4",
    "multigpu_torchrun.py":
        "a launcher has to start it: TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc_per_node=4"}
TWO_GPUS = """
import torch
torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
torch.accelerator.device_count = lambda: 2
"""


@pytest.mark.parametrize("command", BAD)
def test_a_bad_argument_ends_the_run_in_one_line_and_writes_nothing(command, tmp_path):
    script, *arguments = command.split()
    job = train(script, *arguments, cwd=tmp_path, processes=0, device=None, status=2)
    assert job.stderr.startswith(f"{script}: ") and BAD[command] in job.stderr
    assert job.stderr.count("\n") == 1 and job.stdout == ""
    assert [path for path in tmp_path.iterdir() if path.suffix not in (".out", ".err")] == []


def test_what_all_ranks_see_one_says(tmp_path):
    job = run("multigpu_torchrun.py", "--batch-size", 241, cwd=tmp_path, status=1)
    assert job.stderr.count("argument --batch-size: 241 does not divide by 2 processes, as 242 would") == 1


def test_more_processes_than_gpus_are_refused_unless_they_may_share_them(tmp_path):
    here = {"cwd": tmp_path, "before": TWO_GPUS, "processes": 0, "device": None}
    spawn = train("multigpu_spawn.py", "-g", 3, status=2, **here)
    assert "argument -g/--gpus: nccl needs a GPU for each process, with --device cuda there are 2 for 3" in spawn.stderr
    torchrun = train("multigpu_torchrun.py", status=2, **here, LOCAL_RANK=0, LOCAL_WORLD_SIZE=3)
    assert "argument --backend: nccl needs a GPU for each process" in torchrun.stderr
    on_cpu = train("multigpu_spawn.py", 1, "-g", 3, cwd=tmp_path, processes=0, before=TWO_GPUS)
    assert "processes: 3, device: cpu, backend: gloo" in on_cpu.stdout


@pytest.mark.parametrize("script", BY_TORCHRUN)
def test_help_needs_no_launcher(script, tmp_path):
    job = train(script, "--help", cwd=tmp_path, processes=0)
    assert "--checkpoint" in job.stdout and job.stderr == ""


@pytest.mark.parametrize("script, dataset", [("single_gpu.py", "MNIST"), ("multigpu_spawn.py", "CIFAR10")])
def test_a_failed_download_is_one_line(script, dataset, tmp_path):
    """No name resolves where the only proxy is a port that nobody listens on."""
    nowhere = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    job = train(script, 1, "--dataset", dataset, cwd=tmp_path, processes=0, status=1, **nowhere)
    assert "was neither read from data nor downloaded" in job.stderr and job.stderr.count("\n") == 1
