"""What training has beside the parameters of its optimizers is noted, and named where it parts."""
import multiprocessing
from array import array
from types import SimpleNamespace

import pytest
import torch
from check_conversion import beside
from check_conversion.protocol import Beside, Step

forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(["torch", "torch.distributed.tensor", "torch._dynamo"])
SCRIPT = """
import copy, torch
class MoCo(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder_q = torch.nn.Linear(2, 3)
        self.encoder_k = copy.deepcopy(self.encoder_q)
        self.register_buffer("queue", torch.ones(3, 8))
model = MoCo()
teacher = copy.deepcopy(model.encoder_q)
optimizer = torch.optim.SGD(model.encoder_q.parameters(), lr=1)
for step in range(1, 7):
    if step == 2:
        model.queue[0] = step
    if step >= 4:
        teacher.weight.data = torch.full((3, 2), float(step))
    noted.append(set(note(model.encoder_q.parameters())))
"""
ALL = {"model.encoder_k.weight", "model.encoder_k.bias", "model.queue", "teacher.weight", "teacher.bias"}


def run_script(path):
    from check_conversion.observed import beside
    beside.install(SimpleNamespace(copy=path))
    noted = []
    exec(compile(SCRIPT, f"{path}/train.py", "exec"), {"note": beside.before_step, "noted": noted})
    torch.save(noted, "result")


def test_all_that_no_optimizer_holds_by_the_names_that_the_script_has_for_it(folder):
    process = forks.Process(target=run_script, args=(str(folder),))
    process.start()
    process.join(60)
    process.kill()
    assert torch.load("result", weights_only=False) == [
        ALL, ALL, {"model.queue"}, ALL, {"model.queue", "teacher.weight"}, {"model.queue", "teacher.weight"}]


def tensor(*numbers):
    columns = sorted(3.0 * number for number in numbers)
    return Beside(array("d", numbers), [sum(numbers) * 1.0], columns)


def steps(*queues):
    return [Step(beside={"model.queue": tensor(*queue)}) for queue in queues]


SAME = [(1, 2, 3), (1, 2, 4), (1, 2, 5)]
TURNED = [(3, 1, 2), (4, 1, 2), (5, 1, 2)]


@pytest.mark.parametrize("ranks, said", [
    ([SAME, SAME], None), ([SAME, TURNED], None),
    ([SAME, [*SAME[:2], (1, 2, 6)]], "model.queue differs between ranks 0 and 1 in step 3: DDP averages gradients alone"),
    ([[*SAME[:1], (1, 1, 4), (1, 1, 5)]] * 2, "model.queue differs from that of train.py in step 2"),
    ([[(1, 1, 3)] * 3] * 2, None)], ids=str)  # long before
def test_what_has_just_parted_is_named_whatever_the_order_of_its_columns(ranks, said):
    fault = beside.compare_beside(3, steps(*SAME), steps(*SAME), [steps(*rank) for rank in ranks], "train.py")
    assert fault is None if said is None else fault.text.startswith(said)


def test_as_far_as_rounding_parts_it_it_may_part():
    one, nudged, other = steps((1, 2, 3)), steps((1, 2, 3.1)), steps((1, 2, 3.4))
    assert beside.compare_beside(1, one, nudged, [other, other], "train.py") is None
    assert beside.compare_beside(1, one, one, [other, other], "train.py")


def test_many_tensors_are_named_by_their_module():
    assert beside.short(["model.encoder_k.0.weight", "model.encoder_k.0.bias", "model.queue"]) == "model.encoder_k, model.queue"
