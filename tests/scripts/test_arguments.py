"""An argument does what it says, or the run ends with words that say what is wrong, before anything is written."""
import pytest
from launch import after, train
from results import figures


@pytest.mark.parametrize("command, status, says", [
    ("single_gpu.py 0", 2, "argument total_epochs: 0 is not positive"),
    ("single_gpu.py 1 --batch-size 3841", 1, "--batch-size exceeds the training set"),
    ("multigpu_torchrun.py 1 --batch-size 241", 1, "AssertionError: --batch-size must be a multiple of 2"),
    ("single_gpu.py 1 --checkpoint /proc/run.pt", 1, "Error: [Errno"),
    ("multigpu_torchrun.py 1 --dataset CIFAR10", 1, "URLError"),  # no name resolves where nobody listens on the only proxy's port
    ("multigpu_spawn.py 1 -n 2 -nr 2", 2, "--node-rank must be between 0 and 1")])
def test_what_is_wrong_with_an_argument_is_said_and_nothing_is_written(command, status, says, folder):
    job = train(*command.split(), status=status, https_proxy="http://127.0.0.1:9")
    assert says in job.stderr and " | loss " not in job.stdout and not list(folder.glob("*.pt*"))


@pytest.mark.parametrize("script, variables, says", [
    ("multigpu_torchrun.py", {}, "torchrun --standalone --nproc_per_node=4 multigpu_torchrun.py 50 10\n"),
    ("multinode.py", {"SLURM_JOB_ID": 1, "SLURM_NTASKS": 2, "SLURM_PROCID": 0},  # as sbatch sets them, before any srun
     "srun -K -n 8 python multinode.py 50 10\n"),
    ("multigpu_spawn.py", {"LOCAL_RANK": 0}, "python multigpu_spawn.py 50 10\n"),  # by torchrun
    ("multigpu_torchrun.py", {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "WORLD_SIZE": 2}, "use multinode.py\n")])
def test_the_wrong_launcher_ends_the_run_with_the_right_command(script, variables, says, folder):
    job = train(script, 1, "--local-rank=0", processes=0, status=1, **variables)  # an option that the old launcher adds
    assert says in job.stderr and "Traceback" not in job.stderr and job.stdout == "" and not list(folder.iterdir())


FETCHES_SLOWLY = """
import os, time, torch
from torchvision.datasets import FashionMNIST
machine, local_rank = divmod(int(os.environ.get("RANK", 0)), 2)
if machine == 1:  # the second of two, each with a disk of its own
    os.environ["LOCAL_RANK"] = str(local_rank)
def download(self):
    folder = f"{self.root}/{machine}/{self.train}"
    if not os.path.exists(folder):
        time.sleep(1)  # in which another process would begin too
        os.makedirs(folder)  # fails where one has
FashionMNIST.download, FashionMNIST._check_exists = download, lambda self: True
def white(self):
    images = 960 if self.train else 480
    return torch.full((images, 28, 28), 255, dtype=torch.uint8), torch.zeros(images, dtype=torch.int64)
FashionMNIST._load_data = white
""" + after("utils.report", "assert (given[2][1], given[3][1]) == (960, 480)") + after("torch.nn.Conv2d.forward", """
    assert given[0].in_channels > 3 or (*given[1].shape[1:], given[1].max()) == (3, 32, 32, 1)
""")


@pytest.mark.parametrize("script, processes", [("multigpu_spawn.py", 2), ("multigpu_torchrun.py", 2), ("multinode.py", 4)])
def test_one_process_of_each_machine_fetches_a_missing_dataset_while_the_others_wait(script, processes):
    job = train(script, 1, "--dataset", "FashionMNIST", "--device", "cpu", processes=processes, before=FETCHES_SLOWLY)
    assert list(figures(job.stdout)) == [1]
