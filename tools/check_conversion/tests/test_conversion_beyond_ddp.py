"""The same command judges what people convert to instead of DDP."""
import importlib.util
import re

import pytest
from runs import AFTER, BEFORE, changed, check

ADAM = ("SGD(model.parameters(), lr=0.05)", "AdamW(model.parameters(), lr=0.01)")
SAVE = 'if rank == 0:\n    torch.save(model.module.state_dict(), "model.pt")\n'
FSDP = changed(AFTER, ADAM, ("import DistributedDataParallel as DDP", "import DistributedDataParallel"), (
    "model = DDP(", "from torch.distributed.fsdp import fully_shard\nmodel = fully_shard("), (
    "nn.Linear(8, 1)))", 'nn.Linear(8, 1)), mesh=dist.init_device_mesh("cpu", (world_size,)))'), (
    SAVE, "saved = {name: part.full_tensor() for name, part in model.state_dict().items()}\n"
          'if rank == 0:\n    torch.save(saved, "model.pt")\n'))
ACCELERATE = changed(BEFORE, ADAM, ("import torch\n", "import torch\nimport torch.distributed.nn\nfrom accelerate import "
                                                      "Accelerator\naccelerator = Accelerator(cpu=True)\n"), (
    "(data, 24", "(data, 24 // accelerator.num_processes"), ("best = 100\n", "model, optimizer, loader = accelerator.prepare("
                                                             "model, optimizer, loader)\n"), (
    "loss.backward()", "accelerator.backward(loss)"), (
    "    print(f", "    total = accelerator.reduce(torch.tensor(total)).item()\n    accelerator.print(f"), (
    "torch.save(model", "accelerator.save(accelerator.unwrap_model(model)"))
FABRIC = changed(BEFORE, ADAM, ("import torch\n", "import os\nimport torch\nimport torch.distributed.nn\n"
                                "from lightning_fabric import Fabric\nfabric = Fabric(accelerator='cpu', strategy='ddp', "
                                "devices=int(os.environ['WORLD_SIZE']))\nfabric.launch()\n"), (
    "(data, 24", "(data, 24 // fabric.world_size"), ("best = 100\n", "model, optimizer = fabric.setup(model, optimizer)\n"
                                                     "loader = fabric.setup_dataloaders(loader)\n"), (
    "loss.backward()", "fabric.backward(loss)"), (
    "    print(f", "    total = fabric.all_reduce(torch.tensor(total), reduce_op='sum').item()\n    fabric.print(f"), (
    "torch.save(model", "if fabric.global_rank == 0:\n    torch.save(model.module"))
WAYS = {"fsdp": (FSDP, "torch"), "accelerate": (ACCELERATE, "accelerate"), "fabric": (FABRIC, "lightning_fabric")}


@pytest.mark.parametrize("way", WAYS)
def test_fsdp2_accelerate_and_fabric_train_the_same(way):
    after, package = WAYS[way]
    if not importlib.util.find_spec(package):
        pytest.skip(f"for want of {package}")
    status, said = check(changed(BEFORE, ADAM), after, 3)
    assert status == 0 and "printed: 2 of 2 lines the same saved: 1 file the same: model.pt" in said


def test_a_fault_under_fsdp2_is_named():
    status, said = check(changed(BEFORE, ADAM), changed(FSDP, ("mse_loss(model(x), y)", "mse_loss(model(x), y) / 2")))
    assert status == 1 and re.search("step 1: all gradients are 0.5 times those of train.py", said)


def test_fsdp_s_first_version_is_refused_by_name():
    after = changed(AFTER, ("import DistributedDataParallel as DDP", "import DistributedDataParallel\n"
                            "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP"),
                    ("model = DDP(", "model = FSDP("),
                    ("nn.Linear(8, 1)))", "nn.Linear(8, 1)), use_orig_params=True, device_id=torch.device('cpu'))"),
                    (SAVE, ""))
    status, said = check(BEFORE, after)
    assert status == 2 and "the check cannot follow FullyShardedDataParallel, FSDP's first version" in said
