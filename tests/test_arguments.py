"""A bad argument ends the run in one line that names it, before anything is written."""
import torch
from launch import BY_TORCHRUN, run_all

GPUS = torch.cuda.device_count()
BAD = [  # script, arguments, what the line says
    ("single_gpu.py", ["many"], "argument total_epochs: 'many' is not a whole number of 1 to 2**31-1"),
    ("single_gpu.py", ["0"], "argument total_epochs"),
    ("dp.py", ["5", "0.5"], "argument save_every"),
    ("single_gpu.py", ["--batch-size", "0"], "argument --batch-size"),
    ("single_gpu.py", ["--batch-size", "3841"], "argument --batch-size: 3841 exceeds the 3840 training samples"),
    ("multigpu_spawn.py", ["--batch_size", "241"], "argument --batch-size: 241 does not divide by 2 processes, as 242 would"),
    ("single_gpu.py", ["--lr", "0"], "argument --lr"),
    ("single_gpu.py", ["--lr", "nan"], "argument --lr"),
    ("single_gpu.py", ["--dataset", "ImageNet"], "argument --dataset: invalid choice: 'ImageNet' (choose from"),
    ("single_gpu.py", ["--model", "resnet19"], "argument --model: resnet19 is neither cnn nor"),
    ("single_gpu.py", ["--model", "vit_b_16"], "argument --model: vit_b_16 does not train on 240 images of 3x32x32"),
    ("multigpu_spawn.py", ["--model", "resnet18", "--batch-size", "2"], "argument --model: resnet18 does not train on 1 images"),
    ("single_gpu.py", ["--checkpoint", ""], "argument --checkpoint"),
    ("single_gpu.py", ["--workers", "-1"], "argument --workers"),
    ("multigpu_spawn.py", ["--backend", "mpi"], "argument --backend: mpi needs mpirun and a torch built for it"),
    ("multigpu_spawn.py", ["--backend", "nccl", "-g", str(GPUS + 1)], "nccl needs a GPU for each process"),
    ("multigpu_spawn.py", ["-g", "0"], "argument -g/--gpus"),
    ("multigpu_spawn.py", ["-n", "2"], "argument -n/--nodes: several machines need MASTER_ADDR and MASTER_PORT"),
    ("multigpu_spawn.py", ["-nr", "1"], "argument -nr/--node-rank: 1 is not below -n 1"),
    ("multinode.py", [], "LOCAL_RANK, MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE not set; start it by: "
                         "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes=2 --nproc_per_node=4"),
    ("multigpu_torchrun.py", [], "LOCAL_RANK, MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE not set; start it by: "
                                 "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc_per_node=4"),
]


def test_a_bad_argument_ends_the_run_in_one_line_and_writes_nothing(tmp_path):
    jobs = run_all(*[(script, *arguments, dict(cwd=tmp_path, processes=None, status=2))
                     for script, arguments, _ in BAD])
    for (script, arguments, words), job in zip(BAD, jobs):
        assert job.stderr.startswith(f"{script}: ") and words in job.stderr, arguments
        assert job.stderr.count("\n") == 1 and job.stdout == ""
    assert [path for path in tmp_path.iterdir() if path.suffix != ".err"] == []


def test_what_all_ranks_see_one_says_and_a_batch_must_fit_every_world_that_a_restart_may_find(tmp_path):
    seen_by_all, elastic = run_all(
        ("multigpu_torchrun.py", "--lr", 0, dict(cwd=tmp_path, status=1)),
        ("multinode.py", dict(cwd=tmp_path, status=1, processes=1,
                              torchrun=["--nnodes=1:7", "--rdzv-conf=last_call_timeout=1"])))
    assert seen_by_all.stderr.count("argument --lr: 0.0 is not a number above 0") == 1
    assert "argument --batch-size: 240 does not divide by 7 processes, as 420 would" in elastic.stderr


def test_help_needs_no_launcher(tmp_path):
    for job in run_all(*[(script, "--help", dict(cwd=tmp_path, processes=None)) for script in BY_TORCHRUN]):
        assert "--checkpoint" in job.stdout and job.stderr == ""


def test_a_failed_download_is_one_line(tmp_path):
    """No name resolves where the only proxy is a port that nobody listens on."""
    nowhere = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy")}
    for job in run_all(*[(script, 1, "--dataset", name, "--data-dir", "data", dict(cwd=tmp_path, status=1, **nowhere))
                         for script, name in (("single_gpu.py", "MNIST"), ("multigpu_spawn.py", "CIFAR10"))]):
        assert "was neither read from data nor downloaded" in job.stderr and job.stderr.count("\n") == 1
