"""A bad argument ends the run in one line that names it, before anything is written."""
from launch import BY_TORCHRUN, run_all

BAD = [  # script, arguments, what the line says
    ("single_gpu.py", ["many"], "argument total_epochs: 'many' is not a whole number of at least 1"),
    ("single_gpu.py", ["0"], "argument total_epochs"),
    ("dp.py", ["5", "0.5"], "argument save_every"),
    ("single_gpu.py", ["--batch-size", "0"], "argument --batch-size"),
    ("single_gpu.py", ["--batch-size", "3841"], "argument --batch-size: 3841 exceeds the 3840 training samples"),
    ("multigpu_spawn.py", ["--batch_size", "241", "-g", "2", "--device", "cpu"],
     "argument --batch-size: 241 does not divide by 2 processes, as 242 would"),
    ("single_gpu.py", ["--lr", "0"], "argument --lr"),
    ("single_gpu.py", ["--lr", "nan"], "argument --lr"),
    ("single_gpu.py", ["--dataset", "ImageNet"], "argument --dataset: invalid choice: 'ImageNet' (choose from"),
    ("single_gpu.py", ["--model", "resnet19"], "argument --model: invalid choice: 'resnet19' (choose from"),
    ("single_gpu.py", ["--device", "gpu"], "argument --device: invalid choice: 'gpu' (choose from"),
    ("single_gpu.py", ["--workers", "-1"], "argument --workers"),
    ("multigpu_spawn.py", ["--backend", "mpi"], "argument --backend: invalid choice: 'mpi' (choose from"),
    ("multigpu_spawn.py", ["--backend", "nccl", "--device", "cpu"], "nccl"),
    ("multigpu_spawn.py", ["-g", "0"], "argument -g/--gpus"),
    ("multigpu_spawn.py", ["-n", "2"], "argument -n/--nodes: several machines need MASTER_ADDR and MASTER_PORT"),
    ("multigpu_spawn.py", ["-nr", "1"], "argument -nr/--node-rank: 1 is not below -n 1"),
    ("multinode.py", [], "a launcher has to start it: "
                         "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes=2 --nproc_per_node=4"),
    ("multigpu_torchrun.py", [], "a launcher has to start it: "
                                 "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc_per_node=4"),
]


def test_a_bad_argument_ends_the_run_in_one_line_and_writes_nothing(tmp_path):
    jobs = run_all(*[(script, *arguments, dict(cwd=tmp_path, processes=None, device=None, status=2))
                     for script, arguments, _ in BAD])
    for (script, arguments, words), job in zip(BAD, jobs):
        assert job.stderr.startswith(f"{script}: ") and words in job.stderr, arguments
        assert job.stderr.count("\n") == 1 and job.stdout == ""
    assert [path for path in tmp_path.iterdir() if path.suffix != ".err"] == []


def test_what_all_ranks_see_one_says(tmp_path):
    for job, words in zip(run_all(*[("multigpu_torchrun.py", *arguments, dict(cwd=tmp_path, status=1))
                                    for arguments in (["--lr", 0], ["--batch-size", 241])]),
                          ["argument --lr: '0' is not a number above 0", "241 does not divide by 2 processes"]):
        assert job.stderr.count(words) == 1


def test_more_processes_than_gpus_are_refused_unless_they_may_share_them(tmp_path, customize):
    two_gpus = customize("""
import torch
torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
torch.accelerator.device_count = lambda: 2
""")
    spawn, torchrun, on_cpu = run_all(
        ("multigpu_spawn.py", "-g", 3, dict(cwd=tmp_path, status=2, processes=None, device=None, **two_gpus)),
        ("multigpu_torchrun.py", dict(cwd=tmp_path, status=1, processes=3, device=None, **two_gpus)),
        ("multigpu_spawn.py", 1, dict(cwd=tmp_path, processes=None, **two_gpus)))
    assert "argument -g/--gpus: nccl needs a GPU for each process, with --device cuda there are 2 for 3" in spawn.stderr
    assert torchrun.stderr.count("argument --backend: nccl needs a GPU for each process") == 1
    assert "processes: 2, device: cpu, backend: gloo" in on_cpu.stdout


def test_help_needs_no_launcher(tmp_path):
    for job in run_all(*[(script, "--help", dict(cwd=tmp_path, processes=None)) for script in BY_TORCHRUN]):
        assert "--checkpoint" in job.stdout and job.stderr == ""


def test_a_failed_download_is_one_line(tmp_path):
    """No name resolves where the only proxy is a port that nobody listens on."""
    nowhere = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy")}
    for job in run_all(*[(script, 1, "--dataset", name, "--data-dir", "data", dict(cwd=tmp_path, status=1, **nowhere))
                         for script, name in (("single_gpu.py", "MNIST"), ("multigpu_spawn.py", "CIFAR10"))]):
        assert "was neither read from data nor downloaded" in job.stderr and job.stderr.count("\n") == 1
