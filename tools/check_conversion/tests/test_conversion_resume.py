"""--resume: a run that is killed and started again is compared with the run that nobody stopped."""
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launch import ROOT
from runs import TOOL, changed, check_resuming

WAVES, STEPS = ((ROOT / f"examples/{name}_ddp.py").read_text() for name in ("waves", "steps"))
NOT = "^NOT THE SAME RUN: killed at step 21 of 40"
FROM_20 = NOT + ", resumed from step 20 "
EPOCHS, SAMPLES = ("--epochs", 4, "--batch-size", 204), ("--max-steps", 40)  # ten steps from save to save
RESUME = "epochs_done, best = resume(checkpoint.pop(), model, optimizer, schedule)"
CSV = [("            if improved", "            print(f'{epoch},{accuracy:.4f},{os.times().elapsed}', file=log, flush=True)\n"
                                  "            if improved"),
       ("    for epoch in range(epochs", "    log = open('log.csv', 'a')\n    for epoch in range(epochs"),
       ('print(f"epoch', 'print(f"{os.times().elapsed:.2f} s | epoch'),
       ("main(args, device)\n    dist", "main(args, device)\n    print(f'took {os.times().elapsed:.2f} s')\n    dist")]
ONE_RANK = [("DDP(model)  #", "model  #"), (RESUME, f"""model = DDP(model)
    epochs_done = [0]
    if rank == 0:
        {RESUME.replace("model,", "model.module,").replace("epochs_done,", "epochs_done[0],")}
    dist.broadcast_object_list(epochs_done)
    epochs_done, best = epochs_done[0], 0.0""")]
CASES = {  # status, what is said, and the script
    "that loads nothing": (1, NOT + " it starts afresh; the killed run has written waves_best.pt, waves.pt, and the restarted",
                           EPOCHS, changed(WAVES, ("if checkpoint is None", "if True"))),
    "whose ranks do not all load": (
        1, NOT + " the ranks begin with different weights: rank 0 with those of step 20, rank 1 with those of step 0", EPOCHS,
        changed(WAVES, *ONE_RANK)),
    "without Adam's moments": (1, FROM_20 + "step 21: the gradients agree, the optimizer's step does not", SAMPLES, changed(
        STEPS, ('(checkpoint["optimizer"])', '({**checkpoint["optimizer"], "state": {}})'))),
    "that draws frozen layers anew": (
        1, NOT + " it begins with the weights of step 20, but not in table.weight", EPOCHS, changed(WAVES, ("    model = DDP", (
            "    table = torch.nn.Embedding(4, 4).requires_grad_(False)\n    table.weight += os.path.exists('waves.pt')\n"
            "    model = DDP")))),
    "that repeats an epoch": (
        1, NOT + " it begins with the weights of step 20 and takes 30 more steps, the unbroken run 20", EPOCHS, changed(
            WAVES, ('"epoch": epoch + 1', '"epoch": epoch'))),
    "that is seeded once": (1, FROM_20 + "step 21: other random numbers, by torch, for dropout", EPOCHS,
                            changed(WAVES, ("        torch.manual_seed(epoch * world_size + rank)", "        "))),
    "that begins its csv anew": (1, FROM_20 + "log.csv: written 2 times instead of 4", EPOCHS, changed(
        WAVES, *CSV, ("'log.csv', 'a'", "'log.csv', 'w' if rank == 0 else 'a'"))),
    "that is not seeded": (
        2, "two runs of train_ddp.py differ from step 1 on: other weights, .* Begin it with",
        SAMPLES, changed(STEPS, ("    torch.manual_seed(0)\n", ""), ("torch.manual_seed(step", "int(step"))),
    "that saves at its end": (2, "saves nothing before its last step: let it train longer", ("--epochs", 1), WAVES)}


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_is_killed_and_started_again_is_judged_by_the_run_that_nobody_stopped(case):
    status, says, arguments, script = CASES[case]
    found, said = check_resuming(script, *arguments)
    assert found == status and re.search(says, said)


def test_the_command_kills_what_a_launcher_would_start_again():
    """Printed times and a csv are compared too."""
    Path("train_ddp.py").write_text(changed(WAVES, *CSV))
    command = "torchrun --standalone --max-restarts=1 --nproc_per_node=2 train_ddp.py --epochs 4 --batch-size 204"
    found = subprocess.run([sys.executable, TOOL, "--resume", command], capture_output=True, text=True, timeout=300,
                           env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert found.returncode == 0 and re.match(
        "a killed run goes on as if it had never stopped: killed at step 21 of 40, resumed from step 20\n"
        "printed: 4 of 4 lines the same\nwritten: 3 of 3 files the same: log.csv, waves.pt, waves_best.pt\n"
        r"times, what differs in each run, and what each start prints are not compared: \d+\.\d\d s \| epoch",
        found.stdout), found
    assert os.listdir() == ["train_ddp.py"]
