"""The same command trains the same model in every script, at every world size."""
from pathlib import Path

import torch
from launch import IN_FLOAT64, SMALL, after, check_close, check_equal, figures, little_data, load, train


def test_every_script_world_size_and_recipe_that_computes_the_same_ends_with_the_same_weights():
    """Where nothing comes out even: neither the 259 samples, nor the batches of 48 that fit, nor the 101 held-out samples."""
    ways = [("single_gpu.py", 1), ("dp.py", 1), ("multigpu_spawn.py", 1), ("multigpu_spawn.py", 2),
            ("multigpu_torchrun.py", 3), ("multigpu_torchrun.py", 4), ("multinode.py", 2),
            ("recipes/preempt.py", 2), ("recipes/profiler.py", 2), ("recipes/fsdp.py", 3)]
    printed = []
    for number, (script, processes) in enumerate(ways):
        job = train(script, 2, *SMALL, "--checkpoint", f"{number}.pt", "--local-rank", 0,  # as torch.distributed.launch adds it
                    processes=processes, before=IN_FLOAT64 + little_data(259, 101))
        begin, *lines = job.stdout.splitlines()
        assert begin.startswith(f"processes: {processes}, device: ")  # rank 0 alone prints
        assert [line.split()[0] for line in lines] == ["epoch", "epoch", "saved"]
        assert job.stderr == "" or script == "recipes/profiler.py"  # torch warns of nothing; Kineto says that it profiles
        check_equal(f"{number}.pt", "0.pt")
        printed.append(figures(job.stdout))
        assert printed[-1] == printed[0]


AUGMENTED = little_data(120, 11) + """
import random
import numpy, torch
plain = torch.utils.data.TensorDataset.__getitem__
def augmented(self, index):
    assert torch.utils.data.get_worker_info()
    image, label = plain(self, index)
    return image + random.gauss() + numpy.random.normal() + torch.randn(image.shape), label
torch.utils.data.TensorDataset.__getitem__ = augmented
"""


def test_dropout_differs_by_rank_statistics_do_not_and_a_resumed_run_is_the_unbroken_one_augmentation_in_workers_included():
    def part(epochs, checkpoint, before=""):
        train("multigpu_torchrun.py", epochs, "--model", "mobilenet_v3_small", "--batch-size", 60,
              "--checkpoint", checkpoint, "--workers", 1, before=AUGMENTED + before)

    masks = after("torch.nn.Dropout.forward", "given[0].training and zlib.crc32(result.eq(0).cpu().numpy())")
    statistics = after("torch.nn.Module.eval", "'evaluates with', *(buffer.sum().item() for buffer in given[0].buffers())")
    part(2, "unbroken.pt", masks + statistics)
    part(1, "resumed.pt")
    part(2, "resumed.pt")
    torch.testing.assert_close(load("resumed.pt"), load("unbroken.pt"), rtol=0, atol=0)
    one, other = (Path(log).read_text().splitlines() for log in ("log.0", "log.1"))
    drawn = [line for line in one + other if line.isdecimal()]
    assert len(drawn) == len({*drawn}) == 2 * 2 * 2  # ranks, epochs, steps
    evaluated = [[line for line in rank if "with" in line] for rank in (one, other)]
    assert evaluated[0] == evaluated[1] and len({*evaluated[0]}) == 2  # of both epochs


def test_the_plain_command_learns_and_prints_the_same_with_one_process_and_two():
    one, two = (figures(train(*words).stdout) for words in (("single_gpu.py", 8), ("multigpu_torchrun.py", 3)))
    assert one[1][1] < 20 and one[8][1] > 30  # it learns, and not at once
    check_close(two, {epoch: one[epoch] for epoch in (1, 2, 3)})
