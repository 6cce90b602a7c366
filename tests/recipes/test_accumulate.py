"""recipes/accumulate.py: gradients are sent once a step."""
from pathlib import Path

from chapters import block, in_ranks
from launch import IN_FLOAT64, after, check_equal, figures, little_data, train


def test_accumulation_is_the_same_training_and_sends_gradients_once_a_step():
    options, few = (1, "--batch-size", 250), IN_FLOAT64 + little_data(760)
    without = train("multigpu_torchrun.py", *options, processes=1, before=few)
    sends = after("torch.nn.parallel.DistributedDataParallel.forward",
                  "given[0].training, given[0].require_backward_grad_sync")
    job = train("recipes/accumulate.py", *options, before=few + sends)
    assert figures(job.stdout) == figures(without.stdout)
    check_equal("accumulate.pt", "multigpu_torchrun.pt")
    for log in ("log.0", "log.1"):  # four parts of 30 samples, and one of 5
        assert Path(log).read_text().splitlines() == [*["True False"] * 4, "True True"] * 3


def test_the_block_for_padding_gives_the_gradients_of_the_whole_batch():
    in_ranks(f"""
texts, answers, lengths = torch.randint(9, (48, 5)), torch.randint(9, (48, 5)), torch.randint(1, 6, (48,))
answers[torch.arange(5) >= lengths[:, None]] = -100
answers[:12] = -100  # of each rank's first micro-batch: nothing but padding
alone = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
model = DDP(copy.deepcopy(alone))
optimizer = torch.optim.SGD(model.parameters())
F.cross_entropy(alone(texts).flatten(0, 1), answers.flatten()).backward()
batches = zip(*(tensor[rank::world_size].split(4) for tensor in (texts, answers)))
{block("parts = list(")}
assert len(parts) == 4
check(model, alone)
""")
