"""BatchNorm under the check: over the whole batch where it is SyncBatchNorm, on CPUs too."""
import copy
import multiprocessing
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from check_conversion.observed import batchnorm
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo"])
MODEL = dict(momentum=0.3, eps=0.01)


def make(**options):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3, **MODEL | options), nn.ReLU(), nn.Flatten(), nn.Linear(27, 1))


def train(model, images, scale=1):
    """Two steps; what comes of them, in evaluation too."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        (model(images).square().sum() * scale / 10).backward()
        optimizer.step()
    model.eval()
    return [*model.parameters(), *model.buffers(), model(torch.ones(2, 2, 5, 5))]


def be_rank(rank, store, images, model, kept, result):
    torch.set_num_threads(1)
    batchnorm.install(SimpleNamespace(batchnorm_kept=kept, copy="/nowhere"))
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", store), rank=rank, world_size=len(images))
    # copied, for tensors that were sent to a process share their memory
    after = train(DDP(copy.deepcopy(model)), images[rank], scale=len(images))
    torch.save(([one.detach() for one in after], batchnorm.seen), f"{result}.{rank}")
    dist.destroy_process_group()


def train_shared_out(model, parts, kept=False):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [forks.Process(target=be_rank, args=(rank, store.port, parts, model, kept, "result")) for rank in range(len(parts))]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(60)
        one.kill()
    assert [one.exitcode for one in ranks] == [0] * len(ranks)
    return zip(*(torch.load(f"result.{rank}", weights_only=False) for rank in range(len(parts))))


@pytest.mark.parametrize("options", [{}, dict(momentum=None), dict(affine=False), dict(track_running_stats=False)], ids=str)
def test_synchronised_it_trains_as_on_one_process_with_unequal_parts(options):
    images = torch.randn(10, 2, 5, 5) * 3 + 1
    results, seen = train_shared_out(nn.SyncBatchNorm.convert_sync_batchnorm(make(**options)), images.split([7, 2, 1]))
    expected = train(make(**options), images)
    for result in results:
        assert len(result) == len(expected)
        for one, other in zip(result, expected):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert seen == ({"synchronised"},) * 3


def test_plain_batchnorm_of_several_ranks_keeps_its_statistics():
    images = torch.randn(6, 2, 5, 5)
    results, seen = train_shared_out(make(), images.split(3))
    for result in results:
        assert any(torch.equal(one, torch.zeros(3)) for one in result) and any(torch.equal(one, torch.ones(3)) for one in result)
    assert seen == ({"kept"},) * 2


def test_all_keep_their_statistics_where_the_check_asks_for_that():
    _, seen = train_shared_out(nn.SyncBatchNorm.convert_sync_batchnorm(make()), torch.randn(6, 2, 5, 5).split(3), kept=True)
    assert seen == ({"kept"},) * 2


def test_a_single_process_trains_as_always():
    images = torch.randn(6, 2, 5, 5)
    (result,), _ = train_shared_out(make(), [images])
    for one, other in zip(result, train(make(), images)):
        torch.testing.assert_close(one, other)


CONVERTS = "import torch\nif torch.cuda.is_available():\n    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)\n"


def be_one_that_converts_on_gpus(folder, result):
    import sys
    sys.path.insert(0, folder)
    batchnorm.install(SimpleNamespace(batchnorm_kept=False, copy=folder))
    import converts  # noqa: F401  # the user's script
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = make()
    DDP(model)
    torch.save((batchnorm.seen, model[1] in batchnorm.synchronised), result)


def test_a_script_that_converts_on_gpus_alone_is_treated_as_there(tmp_path):
    (tmp_path / "converts.py").write_text(CONVERTS)
    process = forks.Process(target=be_one_that_converts_on_gpus, args=(str(tmp_path), "result"))
    process.start()
    process.join(60)
    process.kill()
    assert torch.load("result", weights_only=False) == ({"converts.py:3"}, True)
